//! What an agent reports of one object, bounded as it comes in.
//!
//! The same types are the API's input, its output, and what is stored as JSON.

use crate::store::{Millis, Snapshot, StatusKey, StatusRow, StepState};
use crate::tasks::machine::ObservedStep;
use async_graphql::{InputObject, SimpleObject};
use serde::{Deserialize, Serialize};
use styrmin_renderer::canonical;

/// Most bytes of a message.
const MESSAGE_MAX: usize = 2048;
/// Most bytes of any other text.
const TEXT_MAX: usize = 512;
/// Most bytes of a name, as Kubernetes has it.
const NAME_MAX: usize = 253;
/// Most containers, conditions and steps of one object.
const LIST_MAX: usize = 200;

/// One pod.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, SimpleObject, InputObject)]
#[graphql(input_name = "PodStatusInput", complex)]
pub struct PodStatus {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Id of the deployment that it belongs to; null for what Styrmin did not deploy.
    pub deployment_id: Option<String>,
    /// Component of the driver that it belongs to.
    pub component: Option<String>,
    /// Pending, Running, Succeeded, Failed or Unknown.
    pub phase: String,
    /// Whether it is ready.
    pub ready: bool,
    /// Restarts of its containers together.
    pub restarts: i64,
    /// In one word.
    pub reason: Option<String>,
    /// In a sentence.
    pub message: Option<String>,
    /// Node that it runs on.
    pub node: Option<String>,
    /// Its containers.
    pub containers: Vec<ContainerStatus>,
    /// When it started, in milliseconds since the Unix epoch.
    #[graphql(skip_output)]
    pub started_at: Option<Millis>,
    /// When the stored row last changed.
    #[serde(skip)]
    #[graphql(skip)]
    pub updated_at: Millis,
}

/// One container of a pod.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, SimpleObject, InputObject)]
#[graphql(input_name = "ContainerStatusInput")]
pub struct ContainerStatus {
    /// Its name.
    pub name: String,
    /// Its image.
    pub image: String,
    /// Whether it is ready.
    pub ready: bool,
    /// Its restarts.
    pub restarts: i64,
    /// waiting, running or terminated.
    pub state: String,
    /// In one word: ImagePullBackOff, OOMKilled, …
    pub reason: Option<String>,
    /// In a sentence.
    pub message: Option<String>,
    /// Exit code of one that terminated.
    pub exit_code: Option<i64>,
}

/// One StyrminDeployment.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, SimpleObject, InputObject)]
#[graphql(input_name = "DeploymentStatusInput", complex)]
pub struct DeploymentStatus {
    /// Id of the deployment.
    pub deployment_id: String,
    /// UID of the object.
    pub uid: String,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Instance that the operator last acted on; before it acted, the one in the spec.
    pub instance_id: Option<String>,
    /// Where the rollout is.
    pub phase: Option<String>,
    /// In one word.
    pub display_state: Option<String>,
    /// In a sentence.
    pub message: Option<String>,
    /// Digest of the spec that the operator last acted on.
    pub spec_digest: Option<String>,
    /// Generation that the operator last acted on.
    pub observed_generation: Option<i64>,
    /// Generation of the object.
    pub generation: i64,
    /// Whether it is being deleted.
    pub deleting: bool,
    /// How often drift was put back.
    pub drift_corrections: Option<i64>,
    /// Its conditions.
    pub conditions: Vec<Condition>,
    /// Steps of the operator's plan.
    pub steps: Vec<StatusStep>,
    /// Requested runs of jobs that have ended, well or not.
    #[serde(default)]
    #[graphql(default)]
    pub finished_jobs: Vec<String>,
    /// Those of them that did not end well.
    #[serde(default)]
    #[graphql(default)]
    pub failed_jobs: Vec<String>,
    /// When the stored row last changed.
    #[serde(skip)]
    #[graphql(skip)]
    pub updated_at: Millis,
}

/// A standard condition.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, SimpleObject, InputObject)]
#[graphql(input_name = "ConditionInput")]
pub struct Condition {
    /// Ready, HelmReleaseReady, …
    #[graphql(name = "type")]
    pub kind: String,
    /// True, False or Unknown.
    pub status: String,
    /// One word.
    pub reason: String,
    /// A sentence.
    pub message: String,
    /// When `status` last changed (RFC 3339).
    pub last_transition_time: String,
}

/// One step of the operator's plan.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, SimpleObject, InputObject)]
#[graphql(input_name = "StepInput")]
pub struct StatusStep {
    /// Its name.
    pub name: String,
    /// Pending, Running, Succeeded, Failed or Skipped, in any case.
    pub state: String,
    /// 1 for the first.
    pub attempt: i64,
    /// When it began (RFC 3339).
    pub started_at: Option<String>,
    /// When it ended (RFC 3339).
    pub ended_at: Option<String>,
    /// For people.
    pub message: Option<String>,
}

/// One GitRepository or Kustomization of Flux.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, SimpleObject, InputObject)]
#[graphql(input_name = "FluxStatusInput", complex)]
pub struct FluxStatus {
    /// GitRepository or Kustomization.
    pub kind: String,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Status of its condition Ready: True, False or Unknown.
    pub ready: String,
    /// Reason of its condition Ready.
    pub reason: Option<String>,
    /// Message of its condition Ready.
    pub message: Option<String>,
    /// Revision that it last fetched or applied: `main@sha1:<commit>`.
    pub revision: Option<String>,
    /// Revision that it last tried.
    pub attempted_revision: Option<String>,
    /// Whether somebody suspended it.
    pub suspended: bool,
    /// Its cluster.
    #[serde(skip)]
    #[graphql(skip)]
    pub cluster_id: String,
    /// When the stored row last changed.
    #[serde(skip)]
    #[graphql(skip)]
    pub updated_at: Millis,
}

/// An object of a snapshot.
pub(super) trait Object: Serialize {
    /// Bounds every text and list of it.
    fn tidy(&mut self);
    /// Kind, namespace and name.
    fn key(&self) -> StatusKey;
    /// The deployment that it says it belongs to.
    fn deployment(&self) -> Option<&str>;
    /// UID, and whether it is being deleted.
    fn end(&self) -> (&str, bool) {
        ("", false)
    }

    /// The row, apart from the time.
    fn row(&self, cluster: &str, snapshot: Snapshot) -> Result<StatusRow, serde_json::Error> {
        let content = serde_json::to_string(self)?;
        let (kind, namespace, name) = self.key();
        let (uid, deleting) = self.end();
        Ok(StatusRow {
            cluster_id: cluster.to_owned(),
            snapshot,
            kind,
            namespace,
            name,
            deployment_id: self.deployment().map(str::to_owned),
            uid: uid.to_owned(),
            deleting,
            digest: canonical::digest_bytes(content.as_bytes()),
            content,
            updated_at: 0,
        })
    }
}

/// Cuts at a character's boundary; what no database holds as text goes.
fn cut(text: &mut String, most: usize) {
    if text.len() > most {
        let end = (0..=most).rev().find(|at| text.is_char_boundary(*at)).unwrap_or_default();
        text.truncate(end);
    }
    if text.contains('\0') {
        *text = text.replace('\0', "?");
    }
}

fn cut_all<'a>(most: usize, texts: impl IntoIterator<Item = &'a mut String>) {
    for text in texts {
        cut(text, most);
    }
}

impl Object for PodStatus {
    fn tidy(&mut self) {
        cut_all(NAME_MAX, [&mut self.namespace, &mut self.name].into_iter().chain(&mut self.deployment_id));
        cut_all(TEXT_MAX, std::iter::once(&mut self.phase).chain(&mut self.component).chain(&mut self.reason));
        cut_all(TEXT_MAX, &mut self.node);
        cut_all(MESSAGE_MAX, &mut self.message);
        self.containers.truncate(LIST_MAX);
        for container in &mut self.containers {
            cut_all(TEXT_MAX, [&mut container.name, &mut container.image, &mut container.state]);
            cut_all(TEXT_MAX, &mut container.reason);
            cut_all(MESSAGE_MAX, &mut container.message);
        }
    }

    fn key(&self) -> StatusKey {
        ("Pod".to_owned(), self.namespace.clone(), self.name.clone())
    }

    fn deployment(&self) -> Option<&str> {
        self.deployment_id.as_deref()
    }
}

impl Object for DeploymentStatus {
    fn tidy(&mut self) {
        cut_all(NAME_MAX, [&mut self.namespace, &mut self.name, &mut self.deployment_id, &mut self.uid]);
        cut_all(TEXT_MAX, self.instance_id.iter_mut().chain(&mut self.phase).chain(&mut self.display_state));
        cut_all(TEXT_MAX, &mut self.spec_digest);
        cut_all(MESSAGE_MAX, &mut self.message);
        self.conditions.truncate(LIST_MAX);
        for condition in &mut self.conditions {
            cut_all(TEXT_MAX, [&mut condition.kind, &mut condition.status, &mut condition.reason]);
            cut(&mut condition.last_transition_time, TEXT_MAX);
            cut(&mut condition.message, MESSAGE_MAX);
        }
        for runs in [&mut self.finished_jobs, &mut self.failed_jobs] {
            runs.truncate(LIST_MAX);
            cut_all(NAME_MAX, runs);
        }
        self.steps.truncate(LIST_MAX);
        for step in &mut self.steps {
            cut_all(TEXT_MAX, [&mut step.name, &mut step.state]);
            cut_all(TEXT_MAX, step.started_at.iter_mut().chain(&mut step.ended_at));
            cut_all(MESSAGE_MAX, &mut step.message);
        }
    }

    fn key(&self) -> StatusKey {
        ("StyrminDeployment".to_owned(), self.namespace.clone(), self.name.clone())
    }

    fn deployment(&self) -> Option<&str> {
        Some(&self.deployment_id)
    }

    fn end(&self) -> (&str, bool) {
        (&self.uid, self.deleting)
    }
}

impl Object for FluxStatus {
    fn tidy(&mut self) {
        cut_all(NAME_MAX, [&mut self.kind, &mut self.namespace, &mut self.name]);
        cut_all(TEXT_MAX, std::iter::once(&mut self.ready).chain(&mut self.reason).chain(&mut self.revision));
        cut_all(TEXT_MAX, &mut self.attempted_revision);
        cut_all(MESSAGE_MAX, &mut self.message);
    }

    fn key(&self) -> StatusKey {
        (self.kind.clone(), self.namespace.clone(), self.name.clone())
    }

    fn deployment(&self) -> Option<&str> {
        None
    }
}

/// RFC 3339 as milliseconds; what is none is as if absent.
fn millis(text: &str) -> Option<Millis> {
    text.parse::<jiff::Timestamp>().ok().map(jiff::Timestamp::as_millisecond)
}

impl DeploymentStatus {
    /// When a condition became True.
    pub(super) fn true_since(&self, kind: &str) -> Option<Millis> {
        let found = self.conditions.iter().find(|condition| condition.kind == kind && condition.status == "True")?;
        millis(&found.last_transition_time)
    }

    /// The steps as the task state machine takes them.
    pub(super) fn observed_steps(&self) -> Vec<ObservedStep<'_>> {
        self.steps
            .iter()
            .map(|step| ObservedStep {
                name: &step.name,
                // A state that we do not know says nothing more than that the step is there.
                state: StepState::try_from(step.state.to_ascii_lowercase()).unwrap_or(StepState::Pending),
                attempt: step.attempt,
                started_at: step.started_at.as_deref().and_then(millis),
                ended_at: step.ended_at.as_deref().and_then(millis),
                message: step.message.as_deref().unwrap_or_default(),
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_cut_at_a_characters_boundary() {
        let mut pod = PodStatus {
            name: "n".repeat(1000),
            message: Some("ä".repeat(2000)),
            reason: Some("a\0b".into()),
            containers: vec![ContainerStatus::default(); 1000],
            ..PodStatus::default()
        };
        pod.tidy();
        assert_eq!(pod.name.len(), NAME_MAX);
        assert_eq!(pod.message, Some("ä".repeat(1024)));
        assert_eq!(pod.reason.as_deref(), Some("a?b"), "PostgreSQL holds no NUL");
        assert_eq!(pod.containers.len(), LIST_MAX);
        let mut flux = FluxStatus { message: Some(format!("a{}", "ä".repeat(2000))), ..FluxStatus::default() };
        flux.tidy();
        assert_eq!(flux.message.map(|text| text.len()), Some(2047), "never in the middle of a character");
    }

    #[test]
    fn equal_content_has_an_equal_digest_whenever_it_was_stored() {
        let pod = PodStatus { name: "a".into(), ..PodStatus::default() };
        let later = PodStatus { updated_at: 9, ..pod.clone() };
        let digest = |pod: &PodStatus| pod.row("c", Snapshot::Pods).unwrap().digest;
        assert_eq!(digest(&pod), digest(&later));
        assert_ne!(digest(&pod), digest(&PodStatus { ready: true, ..pod.clone() }));
    }

    #[test]
    fn states_and_times_are_read_as_they_come() {
        let step = |state: &str| StatusStep {
            name: "s".into(),
            state: state.into(),
            attempt: 1,
            started_at: Some("1970-01-01T00:00:01Z".into()),
            ended_at: Some("yesterday".into()),
            message: None,
        };
        let status = DeploymentStatus {
            steps: ["Running", "succeeded", "FAILED", "odd"].map(step).into(),
            conditions: vec![Condition {
                kind: "Ready".into(),
                status: "True".into(),
                last_transition_time: "1970-01-01T00:00:02+00:00".into(),
                ..Condition::default()
            }],
            ..DeploymentStatus::default()
        };
        let steps = status.observed_steps();
        let states: Vec<StepState> = steps.iter().map(|step| step.state).collect();
        assert_eq!(states, [StepState::Running, StepState::Succeeded, StepState::Failed, StepState::Pending]);
        assert_eq!((steps[0].started_at, steps[0].ended_at), (Some(1000), None));
        assert_eq!(status.true_since("Ready"), Some(2000));
        assert_eq!(status.true_since("HelmReleaseReady"), None);
    }
}
