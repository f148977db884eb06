//! One deployment, as the decision sees it: what is observed is set by hand, and each pass's status becomes
//! the object's.

#![expect(clippy::unwrap_used, reason = "a test")]
#![allow(dead_code, reason = "each file of tests uses a part")]

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use styrmin_agent::operator::FINALIZER;
use styrmin_agent::operator::decide::{
    Action, Decision, DriverSeen, Leftover, Network, Note, ObjectKey, Observed, Settings, Wanted, decide, phase,
    unobserved,
};
use styrmin_agent::operator::hook::{HookSeen, HookState};
use styrmin_agent::operator::release::FailureEvent;
use styrmin_renderer::driver::Driver;
use styrmin_renderer::spec::{Condition, StyrminDeployment, StyrminDeploymentSpec, StyrminDeploymentStatus};

pub(crate) const NOW: &str = "2026-11-29T15:00:00Z";

pub(crate) struct Case {
    pub(crate) now: Timestamp,
    pub(crate) object: StyrminDeployment,
    pub(crate) driver: Driver,
    pub(crate) wanted: Wanted,
    pub(crate) differing: Vec<Value>,
    pub(crate) additions: Vec<Value>,
    pub(crate) unwanted: Vec<ObjectKey>,
    pub(crate) in_the_way: Option<ObjectKey>,
    pub(crate) collisions: Vec<String>,
    pub(crate) network: Option<Network>,
    pub(crate) release: Option<Value>,
    pub(crate) failure: Option<FailureEvent>,
    pub(crate) applied: Option<StyrminDeploymentSpec>,
    pub(crate) revision: Option<String>,
    pub(crate) recorded: bool,
    pub(crate) finished_jobs: Vec<String>,
    pub(crate) hook: Option<HookSeen>,
    pub(crate) still_there: Vec<String>,
    pub(crate) internal_ready: bool,
    pub(crate) missing: Option<String>,
    pub(crate) copy: Option<String>,
    pub(crate) on_their_way: Vec<String>,
    pub(crate) driver_here: bool,
    pub(crate) confirmed: Option<&'static str>,
    pub(crate) restored: bool,
    pub(crate) leftovers: Vec<Leftover>,
    pub(crate) trouble: Option<&'static str>,
}

impl Case {
    pub(crate) fn new() -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../drivers/postgresql");
        let files = ["driver.styrmin.yml", "values.styrmin.yml"]
            .map(|name| (name.to_owned(), std::fs::read_to_string(folder.join(name)).unwrap()));
        Self::of(Driver::from_definition(BTreeMap::from(files), "sha256:0123456789abcdef").unwrap())
    }

    /// With a driver whose actions are `actions`, as YAML.
    pub(crate) fn with_actions(actions: &str) -> Self {
        let mut case = Self::new();
        let spec = &mut case.driver.file.spec;
        spec.actions = styrmin_renderer::yaml::from_str(actions).unwrap();
        case
    }

    fn of(driver: Driver) -> Self {
        let mut object = StyrminDeployment::new("styrmin-k7m2q9xw4t1a", spec("one", json!([])));
        object.metadata.generation = Some(1);
        object.metadata.uid = Some("uid-1".into());
        let release = json!({ "kind": "HelmRelease", "metadata": { "name": "styrmin-k7m2q9xw4t1a" } });
        Self {
            now: NOW.parse().unwrap(),
            object,
            driver,
            wanted: Wanted {
                prerequisites: vec![json!({ "kind": "Namespace", "metadata": { "name": "n" } })],
                release,
                ..Wanted::default()
            },
            differing: Vec::new(),
            additions: Vec::new(),
            unwanted: Vec::new(),
            in_the_way: None,
            collisions: Vec::new(),
            network: Some(Network::default()),
            release: None,
            failure: None,
            applied: None,
            revision: None,
            recorded: true,
            finished_jobs: Vec::new(),
            hook: None,
            still_there: Vec::new(),
            internal_ready: false,
            missing: None,
            copy: None,
            on_their_way: Vec::new(),
            driver_here: true,
            confirmed: None,
            restored: false,
            leftovers: Vec::new(),
            trouble: None,
        }
    }

    /// One pass; its status becomes the object's.
    pub(crate) fn pass(&mut self) -> Decision {
        let driver = if self.driver_here { DriverSeen::Here(&self.driver) } else { DriverSeen::Missing };
        let observed = Observed {
            waiting: self.missing.clone().map(|missing| ("SecretsMissing", missing)),
            copy: self.copy.clone(),
            differing: &self.differing,
            additions: &self.additions,
            going: &self.on_their_way,
            unwanted: &self.unwanted,
            in_the_way: self.in_the_way.as_ref(),
            collisions: &self.collisions,
            network: self.network.as_ref(),
            release: self.release.as_ref(),
            failure: self.failure.as_ref(),
            applied: self.applied.as_ref(),
            revision: self.revision.as_deref(),
            recorded: self.recorded,
            finished_jobs: &self.finished_jobs,
            hook: self.hook.as_ref(),
            still_there: &self.still_there,
            internal_ready: self.internal_ready,
            confirmed: self.confirmed,
            restored: self.restored,
            leftovers: &self.leftovers,
            trouble: self.trouble,
            ..Observed::new(&self.object, driver, Ok(&self.wanted))
        };
        let decision = decide(&observed, self.now, &Settings::default());
        if decision.before.contains(&Action::RecordApplied) {
            self.applied = Some(self.object.spec.clone());
            self.revision = Some(format!("revision-of-{}", self.object.spec.instance_id));
            self.finished_jobs.clone_from(&decision.status.finished_jobs);
        }
        self.object.status = Some(decision.status.clone());
        decision
    }

    /// What is said when nothing could be observed.
    pub(crate) fn told(&self, why: &str) -> Option<(StyrminDeploymentStatus, Vec<Note>)> {
        unobserved(&self.object, why, self.now, &Settings::default())
    }

    /// Passes until nothing changes any more, as the operator makes them; gives the last that did anything.
    pub(crate) fn settle(&mut self) -> Decision {
        let mut last = self.pass();
        for _ in 0..12 {
            let before = self.object.status.clone();
            let next = self.pass();
            if self.object.status == before {
                return last;
            }
            last = next;
        }
        panic!("it never settles: {:?}", self.status());
    }

    /// Time goes by.
    pub(crate) fn after(&mut self, seconds: i64) {
        self.now += SignedDuration::from_secs(seconds);
    }

    /// A change arrives.
    pub(crate) fn change(&mut self, instance: &str) {
        self.object.spec = spec(instance, json!([]));
        // Something of it is another than before.
        self.object.spec.context = json!({ "instance": instance });
        self.object.metadata.generation = self.object.metadata.generation.map(|generation| generation + 1);
    }

    /// Flux says that the release is ready.
    pub(crate) fn flux_ready(&mut self) {
        self.release = Some(
            json!({ "metadata": { "generation": 1 }, "status": { "observedGeneration": 1, "lastAttemptedGeneration": 1,
            "conditions": [{ "type": "Ready", "status": "True", "reason": "InstallSucceeded", "message": "m", "observedGeneration": 1 }] } }),
        );
    }

    /// What is seen of the step that runs or comes next.
    pub(crate) fn sees(&mut self, state: HookState) {
        let steps = &self.object.status.as_ref().unwrap().steps;
        let step = steps.iter().find(|step| step.key.is_some() && step.state != "Succeeded").unwrap();
        self.hook = Some(HookSeen { key: step.key.clone().unwrap(), attempt: step.attempt, state });
    }

    /// Up to Ready.
    pub(crate) fn ready(mut self) -> Self {
        self.object.metadata.finalizers = Some(vec![FINALIZER.into()]);
        self.flux_ready();
        self.settle();
        assert_eq!(self.phase(), phase::READY);
        self
    }

    /// Up to Ready, with every step of an action on the way ending well.
    pub(crate) fn ready_with_setup(mut self) -> Self {
        self.object.metadata.finalizers = Some(vec![FINALIZER.into()]);
        self.flux_ready();
        for _ in 0..10 {
            self.settle();
            if self.phase() == phase::READY {
                return self;
            }
            self.after(20);
            if self.status().steps.iter().any(|step| step.key.is_some() && step.state != "Succeeded") {
                self.sees(HookState::Succeeded);
            }
        }
        panic!("not ready: {:?}", self.status());
    }

    /// Somebody deletes the object.
    pub(crate) fn going(mut self) -> Self {
        self.object.metadata.deletion_timestamp = Some(Time(NOW.parse().unwrap()));
        self.object.metadata.generation = Some(2);
        self
    }

    pub(crate) fn status(&self) -> &StyrminDeploymentStatus {
        self.object.status.as_ref().unwrap()
    }

    pub(crate) fn phase(&self) -> String {
        self.status().phase.clone().unwrap()
    }

    pub(crate) fn reason(&self) -> String {
        self.condition("Ready").unwrap().reason.clone()
    }

    pub(crate) fn condition(&self, kind: &str) -> Option<&Condition> {
        self.status().conditions.iter().find(|condition| condition.r#type == kind)
    }

    /// State and attempt of every step of an action, in order.
    pub(crate) fn steps(&self) -> Vec<String> {
        let of_action = self.status().steps.iter().filter(|step| step.key.is_some());
        of_action.map(|step| format!("{} {} {}", step.name, step.state, step.attempt)).collect()
    }
}

pub(crate) fn spec(instance: &str, jobs: Value) -> StyrminDeploymentSpec {
    serde_json::from_value(json!({
        "deploymentId": "k7m2q9xw4t1a", "instanceId": instance, "lifecycle": "running",
        "driver": { "name": "postgresql", "version": "1.0.0", "digest": "sha256:0123456789abcdef" },
        "applicationVersion": "17", "context": {}, "jobs": jobs,
    }))
    .unwrap()
}

pub(crate) fn leftover(kind: &str, going: bool) -> Leftover {
    let object =
        ObjectKey { version: "v1".into(), kind: kind.into(), namespace: String::new(), name: "n".into(), uid: None };
    Leftover { name: format!("{kind} n"), object, going }
}
