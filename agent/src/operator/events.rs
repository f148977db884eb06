//! Kubernetes events about a StyrminDeployment. The same one again within some minutes is counted on the event
//! that is there.
//!
//! kube's recorder keeps every event that it wrote for some minutes, which is more memory than all that this
//! agent knows of ten thousand deployments; here it is the name of the last few hundred.

use super::decide::Note;
use super::recent::Recent;
use crate::clock;
use crate::snapshot::mark;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::api::{Api, ObjectMeta, Patch, PatchParams, PostParams};
use kube::{Client, Error, Resource as _, ResourceExt as _};
use serde_json::json;
use std::time::Duration;
use styrmin_renderer::spec::StyrminDeployment;
use tokio::time::Instant;

/// Who says it.
const CONTROLLER: &str = "styrmin-operator";
/// For how long the same again is no event of its own.
const SAME: Duration = Duration::from_secs(360);
/// Most bytes of an event's action; the API server takes 128.
const ACTION_MAX: usize = 120;
/// Most bytes of its note; the API server takes 1 KiB.
const NOTE_MAX: usize = 1000;

/// Writes events.
pub(super) struct Events {
    client: Client,
    /// Name and count of what was said lately, by object and words.
    said: Recent<u64, (String, i32)>,
}

impl Events {
    pub(super) fn new(client: Client) -> Self {
        Self { client, said: Recent::new(SAME) }
    }

    /// Says something of an object.
    pub(super) async fn publish(&self, object: &StyrminDeployment, note: &Note) -> kube::Result<()> {
        let namespace = object.namespace().unwrap_or_default();
        let api: Api<Event> = Api::namespaced(self.client.clone(), &namespace);
        let key = mark((&object.metadata.uid, note.warning, &note.reason, &note.message));
        let (at, now) = (Instant::now(), MicroTime(clock::now()));
        if let Some((name, count)) = self.said.get(&key) {
            let count = count.saturating_add(1);
            let patch = json!({ "series": { "count": count, "lastObservedTime": now } });
            match api.patch(&name, &PatchParams::default(), &Patch::Merge(&patch)).await {
                // Events are kept for an hour, or shorter.
                Err(Error::Api(status)) if status.code == 404 => {}
                answer => {
                    self.said.put(key, at, (name, count));
                    return answer.map(drop);
                }
            }
        }
        let name = format!("{}.{:x}{:x}", object.name_any(), now.0.as_nanosecond(), key);
        let event = Event {
            metadata: ObjectMeta { name: Some(name.clone()), namespace: Some(namespace), ..ObjectMeta::default() },
            event_time: Some(now),
            type_: Some(if note.warning { "Warning" } else { "Normal" }.into()),
            reason: Some(note.reason.clone()),
            note: Some(note.message[..note.message.floor_char_boundary(NOTE_MAX)].to_owned()),
            action: Some(note.message[..note.message.floor_char_boundary(ACTION_MAX)].to_owned()),
            regarding: Some(object.object_ref(&())),
            reporting_controller: Some(CONTROLLER.into()),
            reporting_instance: Some(CONTROLLER.into()),
            ..Event::default()
        };
        api.create(&PostParams::default(), &event).await?;
        self.said.put(key, at, (name, 1));
        Ok(())
    }
}
