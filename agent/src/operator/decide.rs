//! What to do about one StyrminDeployment: observed objects and a time in, a decision out.
//!
//! Pure: no I/O, no clock, no async. The way of a rollout:
//!
//! 1. A spec that was not acted on yet: instance, digest and steps are noted, phase
//!    CreatingPrerequisites. Nothing else happens in this pass.
//! 2. Prerequisites: the driver's definition, the decrypted Secret with the fingerprints that the
//!    context names, the application's namespace. Missing ones are waited for.
//! 3. Phase CreatingHelmRelease is noted with the start, then chart source, values and HelmRelease
//!    are written. [`super::release`] judges the HelmRelease, but only when its spec is what we
//!    want: an older one that a watch still shows says nothing.
//! 4. Ready: what was applied is recorded outside the status, then the phase becomes Ready.
//!
//! Every pass also puts back what is missing or changed of our own objects. A pass that was cut off
//! anywhere is simply repeated: each action is idempotent, and each fact is written before the action
//! that relies on it.

use super::release::{self, FailureEvent, Seen, Verdict};
use super::status;
use jiff::{SignedDuration, Timestamp};
use serde_json::Value;
use std::time::Duration;
use styrmin_renderer::driver::Driver;
use styrmin_renderer::objects::ReleaseSettings;
use styrmin_renderer::plan::{self, StepKind, Workflow};
use styrmin_renderer::spec::{Condition, Lifecycle, StyrminDeployment, StyrminDeploymentSpec, StyrminDeploymentStatus};

/// Phases of a rollout and of a teardown.
pub mod phase {
    /// Namespace, secrets, driver.
    pub const PREREQUISITES: &str = "CreatingPrerequisites";
    /// Flux works.
    pub const RELEASE: &str = "CreatingHelmRelease";
    /// What comes after the release.
    pub const SERVICES: &str = "CreatingServices";
    /// Done.
    pub const READY: &str = "Ready";
    /// Flux gave up.
    pub const FAILED: &str = "Failed";
    /// Going, or waiting for a confirmation to go.
    pub const DELETING: &str = "Deleting";
    /// Gone.
    pub const DELETED: &str = "Deleted";
}

/// Settings of the operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// `STYRMIN_OPERATOR_DEPLOYMENT_READY_TIMEOUT`, in seconds.
    pub ready_timeout: u32,
    /// What reaches the HelmRelease.
    pub release: ReleaseSettings,
}

impl Default for Settings {
    fn default() -> Self {
        Self { ready_timeout: 270, release: ReleaseSettings::default() }
    }
}

/// The driver's definition, as it is in the cluster.
#[derive(Debug, Clone, Copy)]
pub enum DriverSeen<'a> {
    /// It can be used.
    Here(&'a Driver),
    /// It has not arrived.
    Missing,
    /// It cannot be read.
    Broken(&'a str),
}

/// Everything that a decision rests on.
#[derive(Debug, Clone)]
pub struct Observed<'a> {
    /// The object.
    pub object: &'a StyrminDeployment,
    /// The driver that its spec names.
    pub driver: DriverSeen<'a>,
    /// What has to arrive before anything can be rendered, as reason and sentence; `None`: nothing.
    pub waiting: Option<(&'static str, String)>,
    /// Why this object is not the one that its application belongs to; `None`: it is.
    pub copy: Option<String>,
    /// Objects that the spec leads to, in the order in which they are applied, or why they cannot be
    /// rendered. Empty while driver or secrets are missing.
    pub wanted: Result<&'a Wanted, &'a str>,
    /// What is there of them: the objects of `wanted` that are missing or differ.
    pub differing: &'a [Value],
    /// Objects of `wanted` that are on their way out: they are made again when they are gone.
    pub going: &'a [String],
    /// The HelmRelease as it is.
    pub release: Option<&'a Value>,
    /// The newest event about a failed install or upgrade.
    pub failure: Option<&'a FailureEvent>,
    /// What was last applied with success.
    pub applied: Option<&'a StyrminDeploymentSpec>,
    /// Why the application may be torn down, when it may.
    pub confirmed: Option<&'a str>,
    /// The file is in Git again while the object is going.
    pub restored: bool,
    /// Objects of the application that a teardown still has to remove, in order: the next is removed
    /// when those before it are gone.
    pub leftovers: &'a [Leftover],
    /// Values of earlier instances, to be removed once this one is ready.
    pub stale: &'a [ObjectKey],
}

/// Objects of one application.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Wanted {
    /// Its namespace, chart sources and values.
    pub prerequisites: Vec<Value>,
    /// The HelmRelease.
    pub release: Value,
}

/// Something that a teardown has to remove.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Leftover {
    /// For people: `HelmRelease styrmin-env-x/styrmin-y`.
    pub name: String,
    /// Which object.
    pub object: ObjectKey,
    /// It is going already.
    pub going: bool,
}

/// Names an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectKey {
    /// `group/version`, or `v1`.
    pub version: String,
    /// Kind.
    pub kind: String,
    /// Empty for objects of the cluster.
    pub namespace: String,
    /// Name.
    pub name: String,
}

/// What to do.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Apply an object.
    Apply(Value),
    /// Delete an object.
    Delete(ObjectKey),
    /// Keep the spec as the one that was last applied with success.
    RecordApplied,
    /// Hold the object.
    AddFinalizer,
    /// Let the object go.
    RemoveFinalizer,
    /// Have Flux apply the folder again.
    ReapplyFolder,
}

/// A Kubernetes event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Note {
    /// Something is wrong.
    pub warning: bool,
    /// One word.
    pub reason: String,
    /// A sentence.
    pub message: String,
}

/// The decision.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Decision {
    /// Done before the status is written.
    pub before: Vec<Action>,
    /// The whole status.
    pub status: StyrminDeploymentStatus,
    /// Done after it.
    pub after: Vec<Action>,
    /// Told to whoever watches events.
    pub notes: Vec<Note>,
    /// Look again after this time, whatever happens. `None`: the timer is enough.
    pub again: Option<Duration>,
}

/// At once: the next pass rests on what this one wrote.
const AT_ONCE: Option<Duration> = Some(Duration::ZERO);

/// Decides.
#[must_use]
pub fn decide(observed: &Observed<'_>, now: Timestamp, settings: &Settings) -> Decision {
    let object = observed.object;
    let mut decision = way(observed, now, settings);
    // Within one decision a condition may have been set twice; its time moves only with what it was.
    if let Some(before) = &object.status {
        status::keep_times(&mut decision.status, before);
    }
    let held = object.metadata.finalizers.iter().flatten().any(|name| name == super::FINALIZER);
    if object.metadata.deletion_timestamp.is_none() && !held && observed.copy.is_none() {
        decision.before.insert(0, Action::AddFinalizer);
    }
    decision
}

fn way(observed: &Observed<'_>, now: Timestamp, settings: &Settings) -> Decision {
    let object = observed.object;
    let mut status = object.status.clone().unwrap_or_default();
    status.observed_generation = object.metadata.generation;
    let going = object.metadata.deletion_timestamp.is_some();
    if let Some(why) = &observed.copy {
        // Two objects for one application would fight, and the end of one would be the end of the other's.
        let after = if going { vec![Action::RemoveFinalizer] } else { Vec::new() };
        return Decision { after, ..fail(status, "Copy", why, object.metadata.generation, now) };
    }
    if going || object.spec.lifecycle == Lifecycle::Deleting {
        return teardown(observed, status, now);
    }
    let left = [Some(phase::DELETING), Some(phase::DELETED)].contains(&status.phase.as_deref()) || begun(&status);
    if left || status.spec_digest.as_deref() != Some(object.spec.digest().as_str()) {
        return begin(observed, status, now);
    }
    rollout(observed, status, now, settings)
}

/// Notes what is acted on from now on.
fn begin(observed: &Observed<'_>, mut status: StyrminDeploymentStatus, now: Timestamp) -> Decision {
    let spec = &observed.object.spec;
    let DriverSeen::Here(driver) = observed.driver else {
        status.phase = Some(phase::PREREQUISITES.into());
        status.steps = status::waiting_steps(now);
        return wait_for_driver(observed, status, now);
    };
    let plan = plan::plan(observed.applied, Some(spec), &driver.file.spec);
    status.instance_id = Some(spec.instance_id.clone());
    status.spec_digest = Some(spec.digest());
    status.rollout_started_at = None;
    status.phase = Some(phase::PREREQUISITES.into());
    status.display_state = Some(status::DEPLOYING.into());
    status.message = None;
    status.steps = status::steps(&plan, now);
    let generation = observed.object.metadata.generation;
    status::set(&mut status, "HelmReleaseReady", "Unknown", "Progressing", "The rollout has begun", generation, now);
    status::set(&mut status, "Ready", "Unknown", "Progressing", "The rollout has begun", generation, now);
    status.conditions.retain(|condition| condition.r#type != "HelmReleaseRemediated");
    let what = match plan.workflow {
        Workflow::None => "nothing that was applied changes".to_owned(),
        workflow => format!("workflow {}", workflow.as_str()),
    };
    let notes = vec![note("RolloutStarted", format!("Instance {}: {what}", spec.instance_id))];
    Decision { status, notes, again: AT_ONCE, ..Decision::default() }
}

/// Nothing can be planned without the driver. The instance is noted all the same: people see that
/// the change has arrived and what it waits for.
fn wait_for_driver(observed: &Observed<'_>, mut status: StyrminDeploymentStatus, now: Timestamp) -> Decision {
    let spec = &observed.object.spec;
    let generation = observed.object.metadata.generation;
    let driver = &spec.driver;
    let message = match observed.driver {
        DriverSeen::Broken(why) => {
            format!("The definition of driver {} {} cannot be read: {why}", driver.name, driver.version)
        }
        _ => format!("Waiting for the definition of driver {} {} to arrive from Git", driver.name, driver.version),
    };
    status.instance_id = Some(spec.instance_id.clone());
    if let DriverSeen::Broken(_) = observed.driver {
        return fail(status, "DriverBroken", &message, generation, now);
    }
    wait(status, "DriverMissing", &message, generation, now)
}

/// Something has to arrive. What runs goes on running and stays what it is; only a rollout waits.
fn wait(
    mut status: StyrminDeploymentStatus,
    reason: &str,
    message: &str,
    generation: Option<i64>,
    now: Timestamp,
) -> Decision {
    status.message = Some(message.to_owned());
    if status.phase.as_deref() == Some(phase::PREREQUISITES) {
        status.display_state = Some(status::DEPLOYING.into());
        status::run(&mut status, &StepKind::Prerequisites, now);
        status::explain(&mut status, &StepKind::Prerequisites, message);
        status::set(&mut status, "Ready", "Unknown", reason, message, generation, now);
    }
    Decision { status, again: Some(Duration::from_secs(5)), ..Decision::default() }
}

fn rollout(
    observed: &Observed<'_>,
    mut status: StyrminDeploymentStatus,
    now: Timestamp,
    settings: &Settings,
) -> Decision {
    let generation = observed.object.metadata.generation;
    let DriverSeen::Here(driver) = observed.driver else {
        return wait_for_driver(observed, status, now);
    };
    if let Some(hook) = status::unfinished_hook(&status, driver, observed) {
        // Running actions is a later step of the operator; a release that needs them must not go out without.
        return fail(status, "HookNotSupported", &hook, generation, now);
    }
    if let Some((reason, missing)) = &observed.waiting {
        return wait(status, reason, missing, generation, now);
    }
    let wanted = match observed.wanted {
        Ok(wanted) => wanted,
        Err(why) => return fail(status, "RenderFailed", why, generation, now),
    };
    if status.phase.as_deref() == Some(phase::PREREQUISITES) {
        status::finish(&mut status, &StepKind::Prerequisites, now);
        status::run(&mut status, &StepKind::HelmRelease, now);
        status.phase = Some(phase::RELEASE.into());
        status.message = None;
        status.rollout_started_at = Some(now.to_string());
        let after = observed.differing.iter().cloned().map(Action::Apply).collect();
        return Decision { status, after, again: Some(Duration::from_secs(5)), ..Decision::default() };
    }
    let after: Vec<Action> = observed.differing.iter().cloned().map(Action::Apply).collect();
    let mut notes = Vec::new();
    let done = matches!(status.phase.as_deref(), Some(phase::READY));
    if done {
        let names: Vec<String> = observed.differing.iter().map(name_of).collect();
        let message = format!("Put back {}", names.join(", "));
        // What was applied a moment ago may not be seen yet: the same again is not counted again.
        if !names.is_empty() && status::put_back(&mut status, &message, generation, now) {
            status.drift_corrections = Some(status.drift_corrections.unwrap_or_default() + 1);
            notes.push(warning("DriftCorrected", message));
        } else if names.is_empty() && observed.going.is_empty() {
            status::nothing_to_put_back(&mut status);
        }
    }
    if let Some(drifted) = observed.release.filter(|_| done).and_then(release::drifted)
        && status::drifted(&mut status, &drifted, generation)
    {
        status.drift_corrections = Some(status.drift_corrections.unwrap_or_default() + 1);
        notes.push(warning("DriftCorrected", drifted.message));
    }
    // An older object that a watch still shows says nothing about what was asked for now.
    let same = |name: &String| name.starts_with("HelmRelease ");
    let current = observed.differing.iter().all(|object| object["kind"] != wanted.release["kind"])
        && !observed.going.iter().any(same);
    let verdict = observed.release.filter(|_| current).map_or_else(
        || Verdict::Progressing(Seen::default()),
        |found| release::judge(found, observed.failure, settings.release.retries),
    );
    let mut decision = match verdict {
        // The event that told of the failure is kept for an hour; the conclusion stays.
        Verdict::Ready if observed.failure.is_none() && concluded(&status, observed.release) => {
            Decision { status, ..Decision::default() }
        }
        Verdict::Ready => ready(observed, status, now),
        Verdict::Failed { reason, message, seen } => {
            status::copy(&mut status, &seen, generation, now);
            fail(status, &reason, &message, generation, now)
        }
        Verdict::Error { message, seen } => {
            status::copy(&mut status, &seen, generation, now);
            error(status, "Failing", &message, generation, now)
        }
        Verdict::Progressing(seen) => progressing(status, &seen, now, settings, generation, done),
    };
    if !observed.going.is_empty() {
        decision.again = Some(decision.again.unwrap_or(Duration::from_secs(2)).min(Duration::from_secs(2)));
    }
    decision.after.splice(0..0, after);
    decision.notes.extend(notes);
    decision
}

/// The rollout failed because Flux never applied the change, and nothing was deployed since.
fn concluded(status: &StyrminDeploymentStatus, release: Option<&Value>) -> bool {
    let failed = |condition: &&Condition| {
        condition.r#type == "Ready" && matches!(condition.reason.as_str(), "InstallFailed" | "UpgradeFailed")
    };
    let since = status.conditions.iter().find(failed).and_then(|condition| condition.last_transition_time.parse().ok());
    status.phase.as_deref() == Some(phase::FAILED)
        && since.zip(release).is_some_and(|(since, release)| release::deployed_before(release, since))
}

/// Flux works. A release that was ready stays so for people: its pods may restart, or Flux puts back
/// drift; the health of the pods says that.
fn progressing(
    mut status: StyrminDeploymentStatus,
    seen: &Seen,
    now: Timestamp,
    settings: &Settings,
    generation: Option<i64>,
    done: bool,
) -> Decision {
    if done {
        return Decision { status, ..Decision::default() };
    }
    status::copy(&mut status, seen, generation, now);
    if status.phase.as_deref() == Some(phase::FAILED) {
        return Decision { status, ..Decision::default() };
    }
    let why = seen.ready.as_ref().filter(|ready| ready.status == "False").map(|ready| ready.message.clone());
    status.message.clone_from(&why);
    status::run(&mut status, &StepKind::HelmRelease, now);
    if let Some(why) = &why {
        status::explain(&mut status, &StepKind::HelmRelease, why);
    }
    if status.display_state.as_deref() != Some(status::ERROR) {
        status.display_state = Some(status::DEPLOYING.into());
    }
    timed(status, now, settings, generation, why.as_deref())
}

/// Becomes an error when the rollout takes too long; the phase stays, since it can still succeed.
fn timed(
    mut status: StyrminDeploymentStatus,
    now: Timestamp,
    settings: &Settings,
    generation: Option<i64>,
    why: Option<&str>,
) -> Decision {
    let limit = SignedDuration::from_secs(i64::from(settings.ready_timeout));
    let started: Option<Timestamp> = status.rollout_started_at.as_deref().and_then(|at| at.parse().ok());
    let Some(started) = started else {
        return Decision { status, ..Decision::default() };
    };
    let left = limit - now.duration_since(started);
    if left.is_positive() {
        let left = Duration::try_from(left).unwrap_or_default();
        return Decision { status, again: Some(left + Duration::from_millis(100)), ..Decision::default() };
    }
    let phase = status.phase.clone().unwrap_or_default();
    let mut message =
        format!("Deployment did not reach Ready within {} seconds, phase {phase}", settings.ready_timeout);
    if let Some(why) = why {
        message.push_str(": ");
        message.push_str(why);
    }
    status.message = Some(message.clone());
    error(status, "ReadyTimeout", &message, generation, now)
}

fn ready(observed: &Observed<'_>, mut status: StyrminDeploymentStatus, now: Timestamp) -> Decision {
    let generation = observed.object.metadata.generation;
    let spec = &observed.object.spec;
    let was = status.phase.clone();
    status::set(
        &mut status,
        "HelmReleaseReady",
        "True",
        "FluxReady",
        "Flux reports the release ready",
        generation,
        now,
    );
    status.conditions.retain(|condition| condition.r#type != "HelmReleaseRemediated");
    status::set(&mut status, "Ready", "True", "Ready", "The deployment is ready", generation, now);
    status::finish_all(&mut status, now);
    status.phase = Some(phase::READY.into());
    let stopped = spec.lifecycle == Lifecycle::Stopped;
    status.display_state = Some(if stopped { status::STOPPED } else { status::RUNNING }.into());
    status.message = None;
    // Recorded before the phase says so: a deployment that is ready has its record.
    let known = was.as_deref() == Some(phase::READY) || observed.applied == Some(spec);
    let before = if known { Vec::new() } else { vec![Action::RecordApplied] };
    let notes = if was.as_deref() == Some(phase::READY) {
        Vec::new()
    } else {
        vec![note("Ready", format!("Instance {} is ready", spec.instance_id))]
    };
    let after = observed.stale.iter().cloned().map(Action::Delete).collect();
    Decision { before, status, after, notes, ..Decision::default() }
}

fn fail(
    mut status: StyrminDeploymentStatus,
    reason: &str,
    message: &str,
    generation: Option<i64>,
    now: Timestamp,
) -> Decision {
    let news = status.phase.as_deref() != Some(phase::FAILED);
    status.phase = Some(phase::FAILED.into());
    let mut decision = error(status, reason, message, generation, now);
    if news {
        decision.notes = vec![warning("RolloutFailed", message.to_owned())];
    }
    decision
}

fn error(
    mut status: StyrminDeploymentStatus,
    reason: &str,
    message: &str,
    generation: Option<i64>,
    now: Timestamp,
) -> Decision {
    status.display_state = Some(status::ERROR.into());
    status.message = Some(message.to_owned());
    status::set(&mut status, "Ready", "False", reason, message, generation, now);
    status::fail_first(&mut status, message, now);
    Decision { status, ..Decision::default() }
}

/// The object is going, or says that it should. The application goes only with a reason.
fn teardown(observed: &Observed<'_>, mut status: StyrminDeploymentStatus, now: Timestamp) -> Decision {
    let metadata = &observed.object.metadata;
    let generation = metadata.generation;
    let going = metadata.deletion_timestamp.is_some();
    let held = metadata.finalizers.iter().flatten().any(|name| name == super::FINALIZER);
    if going && !held {
        // Somebody else's finalizer holds it; ours has done its work, or never came to it.
        return Decision { status, ..Decision::default() };
    }
    if going && observed.restored && status.phase.as_deref() != Some(phase::DELETED) && !begun(&status) {
        let notes = vec![note("Restored", "The file is in Git again; the application was not touched".into())];
        let after = vec![Action::RemoveFinalizer, Action::ReapplyFolder];
        return Decision { status, after, notes, ..Decision::default() };
    }
    let Some(reason) = observed.confirmed.map(str::to_owned).or_else(|| begun(&status).then(String::new)) else {
        let message = "The file left Git, and nobody asked for a deletion: the application keeps running until the \
                       deletion is confirmed or the file is put back";
        let news = !has(&status, "NotConfirmed");
        status.phase = Some(phase::DELETING.into());
        status.message = Some(message.into());
        status::set(&mut status, "Ready", "Unknown", "NotConfirmed", message, generation, now);
        let notes = if news { vec![warning("NotConfirmed", message.to_owned())] } else { Vec::new() };
        return Decision { status, notes, ..Decision::default() };
    };
    let mut notes = Vec::new();
    if !begun(&status) {
        // Noted before anything is removed: a teardown that has begun goes on, whatever is said later.
        status.phase = Some(phase::DELETING.into());
        status.display_state = Some(status::DELETING.into());
        status.message = Some(format!("Removing the application: {reason}"));
        status::set(&mut status, "Ready", "False", "Deleting", &reason, generation, now);
        status.steps = status::teardown_steps(now);
        notes.push(note("TeardownStarted", reason));
        return Decision { status, notes, again: AT_ONCE, ..Decision::default() };
    }
    if let Some(next) = observed.leftovers.first() {
        let message = format!("Waiting for {} to go", next.name);
        status.message = Some(message.clone());
        status::explain(&mut status, &StepKind::Teardown, &message);
        let after = if next.going { Vec::new() } else { vec![Action::Delete(next.object.clone())] };
        return Decision { status, after, again: Some(Duration::from_secs(2)), ..Decision::default() };
    }
    status.phase = Some(phase::DELETED.into());
    status.display_state = Some(status::DELETED.into());
    status.message = None;
    status::finish_all(&mut status, now);
    let after = if going { vec![Action::RemoveFinalizer] } else { Vec::new() };
    Decision { status, after, notes, ..Decision::default() }
}

fn has(status: &StyrminDeploymentStatus, reason: &str) -> bool {
    status.conditions.iter().any(|condition: &Condition| condition.r#type == "Ready" && condition.reason == reason)
}

/// A teardown has begun.
fn begun(status: &StyrminDeploymentStatus) -> bool {
    has(status, "Deleting")
}

fn note(reason: &str, message: String) -> Note {
    Note { warning: false, reason: reason.into(), message }
}

fn warning(reason: &str, message: String) -> Note {
    Note { warning: true, ..note(reason, message) }
}

fn name_of(object: &Value) -> String {
    let part = |pointer: &str| object.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
    format!("{} {}", part("/kind"), part("/metadata/name"))
}
