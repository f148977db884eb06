//! What to do about one StyrminDeployment: observed objects and a time in, a decision out.
//!
//! Pure: no I/O, no clock, no async. The way of a rollout:
//!
//! 1. A spec that was not acted on yet: instance, digest and steps are noted, phase
//!    CreatingPrerequisites. Nothing else happens in this pass, unless it is an object's first one and no
//!    action of a driver comes before.
//! 2. The steps of the plan follow, one after the other, each of which a pass may end ([`work`]): what
//!    the release needs; a driver's actions before it; the release, which [`super::release`] judges,
//!    but only when its spec is what we want: an older one that a watch still shows says nothing;
//!    actions after it; services, policies and aliases, once the chart's own Services are known; actions
//!    after those.
//! 3. Ready: what was applied is recorded outside the status, then the phase becomes Ready.
//!
//! Every pass also puts back what is missing or changed of our own objects. A pass that was cut off
//! anywhere is simply repeated: each action is idempotent, and each fact is written before the action
//! that relies on it. The end of a deployment is in [`super::teardown`].

use super::hook::{self, HookSeen, Progress};
use super::release::{self, FailureEvent, Seen, Verdict};
use super::steps::{self, Base};
use super::{status, teardown};
use jiff::{SignedDuration, Timestamp};
use serde_json::Value;
use std::time::Duration;
use styrmin_renderer::driver::Driver;
use styrmin_renderer::hooks;
use styrmin_renderer::objects::{self, ReleaseSettings};
use styrmin_renderer::plan::{self, Plan, StepKind, Workflow};
use styrmin_renderer::post_render;
use styrmin_renderer::spec::{
    Condition, Endpoint, Latched, Lifecycle, RenderedRelease, StyrminDeployment, StyrminDeploymentSpec,
    StyrminDeploymentStatus,
};

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

    /// The phase of this name; empty when there is none.
    #[must_use]
    pub fn known(name: &str) -> &'static str {
        let all = [PREREQUISITES, RELEASE, SERVICES, READY, FAILED, DELETING, DELETED];
        all.into_iter().find(|known| *known == name).unwrap_or_default()
    }
}

/// Settings of the operator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// `STYRMIN_OPERATOR_DEPLOYMENT_READY_TIMEOUT`, in seconds.
    pub ready_timeout: u32,
    /// What reaches the HelmRelease.
    pub release: ReleaseSettings,
    /// `STYRMIN_OPERATOR_RETRY_DELAY`, in seconds: the first pause before another attempt at a teardown's
    /// actions.
    pub retry_delay: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Self { ready_timeout: 270, release: ReleaseSettings::default(), retry_delay: 30 }
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
    /// The objects of `wanted` that are missing or differ.
    pub differing: &'a [Value],
    /// What is missing or differs because of what we read: aliases that nobody ever wrote, copies of what is
    /// another one now. Writing it puts nothing back.
    pub additions: &'a [Value],
    /// Objects of `wanted` that are on their way out: they are made again when they are gone.
    pub going: &'a [String],
    /// Policies, services and aliases of ours that are not wanted any more.
    pub unwanted: &'a [ObjectKey],
    /// A Service of ours whose name the chart wants: Helm refuses to take it over.
    pub in_the_way: Option<&'a ObjectKey>,
    /// Aliases that were not written because the chart has a Service of their name.
    pub collisions: &'a [String],
    /// The chart's Services, once they were looked for (in phase CreatingServices).
    pub network: Option<&'a Network>,
    /// The HelmRelease as it is.
    pub release: Option<&'a Value>,
    /// The newest event about a failed install or upgrade.
    pub failure: Option<&'a FailureEvent>,
    /// What was last applied with success.
    pub applied: Option<&'a StyrminDeploymentSpec>,
    /// Name of the revision that holds it.
    pub revision: Option<&'a str>,
    /// A revision holds what was applied. Somebody may have deleted it.
    pub recorded: bool,
    /// Runs of jobs that had ended when it was applied.
    pub finished_jobs: &'a [String],
    /// What is there of the step of an action that comes next or runs.
    pub hook: Option<&'a HookSeen>,
    /// Pods of the components that the step which runs stops.
    pub still_there: &'a [String],
    /// One of the pods is ready, for a deployment of Styrmin's own: that is enough.
    pub internal_ready: bool,
    /// Why the application may be torn down, when it may.
    pub confirmed: Option<&'a str>,
    /// The file is in Git again while the object is going.
    pub restored: bool,
    /// Objects of the application that a teardown still has to remove, in order: the next is removed
    /// when those before it are gone.
    pub leftovers: &'a [Leftover],
    /// Values and Jobs of earlier instances, to be removed once this one is ready.
    pub stale: &'a [ObjectKey],
    /// Why the last pass ended early: what the API server refused.
    pub trouble: Option<&'a str>,
}

impl<'a> Observed<'a> {
    /// An object of which nothing else is known.
    #[must_use]
    pub fn new(object: &'a StyrminDeployment, driver: DriverSeen<'a>, wanted: Result<&'a Wanted, &'a str>) -> Self {
        Self {
            object,
            driver,
            waiting: None,
            copy: None,
            wanted,
            differing: &[],
            additions: &[],
            going: &[],
            unwanted: &[],
            in_the_way: None,
            collisions: &[],
            network: None,
            release: None,
            failure: None,
            applied: None,
            revision: None,
            recorded: true,
            finished_jobs: &[],
            hook: None,
            still_there: &[],
            internal_ready: false,
            confirmed: None,
            restored: false,
            leftovers: &[],
            stale: &[],
            trouble: None,
        }
    }

    /// What the keys of steps follow from.
    #[must_use]
    pub fn base(&self) -> Base<'_> {
        let driver = match self.driver {
            DriverSeen::Here(driver) => &driver.digest,
            _ => &self.object.spec.driver.digest,
        };
        Base::of(self.revision, self.object.status.as_ref(), driver)
    }

    /// The way to what the spec says.
    fn plan(&self, driver: &Driver) -> Plan {
        planned(self.object, self.applied, driver)
    }
}

/// The way from what was last applied to what an object says. One whose status tells of something applied that
/// no revision holds any more is not set up again: there is live data.
pub(super) fn planned(object: &StyrminDeployment, applied: Option<&StyrminDeploymentSpec>, driver: &Driver) -> Plan {
    let was_applied = object.status.as_ref().is_some_and(|status| status.applied_digest.is_some());
    let actions = &driver.file.spec.actions;
    let plan = match applied {
        None if was_applied => plan::plan_from_unknown(Some(&object.spec), actions),
        applied => plan::plan(applied, Some(&object.spec), actions),
    };
    let leads_back = || object.status.as_ref().is_some_and(|status| leads_back(status, &object.spec));
    if plan.workflow == Workflow::None && leads_back() { plan::plan_back() } else { plan }
}

/// What was applied is asked for while something else is there, or was begun.
fn leads_back(status: &StyrminDeploymentStatus, spec: &StyrminDeploymentSpec) -> bool {
    if status.spec_digest.as_deref() == Some(spec.digest().as_str()) {
        // Decided when it was noted.
        !status.steps.is_empty()
    } else {
        status.spec_digest.is_some() && status.spec_digest != status.applied_digest
    }
}

/// How the declared services are reached.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Network {
    /// Each of them.
    pub endpoints: Vec<Endpoint>,
    /// Names of the chart's own Services.
    pub chart_services: Vec<String>,
    /// Components with overrides of which the chart renders nothing.
    pub missing_components: Vec<String>,
}

/// Objects of one application.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Wanted {
    /// Its namespace, policies, chart sources and values.
    pub prerequisites: Vec<Value>,
    /// The HelmRelease; null when there shall be none yet.
    pub release: Value,
    /// The release is still the one of before: steps of actions come first.
    pub held: bool,
    /// Services and aliases, which follow the release.
    pub services: Vec<Value>,
}

impl Wanted {
    /// What the release is rendered to; `None` while it is that of before, or there is none.
    fn rendered(&self) -> Option<RenderedRelease> {
        (!self.held && !self.release.is_null()).then(|| objects::rendered(&self.release))
    }
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
    /// Only the object with this UID is meant; `None`: whichever has the name.
    pub uid: Option<String>,
}

impl ObjectKey {
    /// Whichever object has the name.
    #[must_use]
    pub fn new(version: &str, kind: &str, namespace: &str, name: &str) -> Self {
        let [version, kind, namespace, name] = [version, kind, namespace, name].map(str::to_owned);
        Self { version, kind, namespace, name, uid: None }
    }
}

/// What to do.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Apply an object.
    Apply(Value),
    /// Delete an object.
    Delete(ObjectKey),
    /// Have Flux work on a release again that somebody has suspended.
    Resume(ObjectKey),
    /// Run a command in a container, for a step of an action.
    Execute(hook::Execution),
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

impl Decision {
    /// Looks again after this time at the latest.
    fn no_later(&mut self, time: Duration) {
        self.again = Some(self.again.map_or(time, |again| again.min(time)));
    }
}

/// Phases in which a rollout is under way.
const ROLLS: [&str; 3] = [phase::PREREQUISITES, phase::RELEASE, phase::SERVICES];

/// A rollout is under way.
pub(super) fn rolls(status: &StyrminDeploymentStatus) -> bool {
    ROLLS.contains(&status.phase.as_deref().unwrap_or_default())
}

/// Reason of a rollout that takes too long.
const READY_TIMEOUT: &str = "ReadyTimeout";
/// At once: the next pass rests on what this one wrote.
pub(super) const AT_ONCE: Option<Duration> = Some(Duration::ZERO);
/// How long a watch may take at most, as a rule, to show what was written.
const SEEN_BY_THEN: SignedDuration = SignedDuration::from_secs(10);
/// How soon to look again at what a watch should have shown.
const SOON: Duration = Duration::from_secs(5);

/// Reasons of events that say more of a new phase than its name.
const SAYS_THE_PHASE: [&str; 6] =
    ["NotConfirmed", "Ready", "Renewed", "RolloutFailed", "RolloutStarted", "TeardownStarted"];

/// What can be said of an object of which nothing could be observed: which instance it is about, and `why`; with what
/// is news of that. `None`: nothing that is worth a write.
#[must_use]
pub fn unobserved(
    object: &StyrminDeployment,
    why: &str,
    now: Timestamp,
    settings: &Settings,
) -> Option<(StyrminDeploymentStatus, Vec<Note>)> {
    let mut status = object.status.clone().unwrap_or_default();
    let ends = object.metadata.deletion_timestamp.is_some() || object.spec.lifecycle == Lifecycle::Deleting;
    if ends || teardown::left(&status) {
        // What is known of an end decides what is removed.
        return None;
    }
    if status.instance_id.as_ref() != Some(&object.spec.instance_id) {
        wait_anew(&mut status, object, now);
    } else if !rolls(&status) {
        // What runs goes on running.
        return None;
    }
    status.message = Some(why.to_owned());
    let Decision { mut status, notes, .. } = timed(object, status, now, settings, Some(why));
    bound_message(&mut status);
    (Some(&status) != object.status.as_ref()).then_some((status, notes))
}

/// Decides.
#[must_use]
pub fn decide(observed: &Observed<'_>, now: Timestamp, settings: &Settings) -> Decision {
    let object = observed.object;
    let mut decision = way(observed, now, settings);
    let default = StyrminDeploymentStatus::default();
    let before = object.status.as_ref().unwrap_or(&default);
    if let (None, Some(trouble)) = (&decision.status.message, observed.trouble) {
        decision.status.message = Some(trouble.to_owned());
    }
    bound_message(&mut decision.status);
    // Within one decision a condition may have been set twice; its time moves only with what it was.
    status::keep_times(&mut decision.status, before);
    let says_the_phase = |note: &Note| SAYS_THE_PHASE.contains(&note.reason.as_str());
    if !decision.notes.iter().any(says_the_phase)
        && let Some(phase) = decision.status.phase.clone().filter(|phase| before.phase.as_ref() != Some(phase))
    {
        decision.notes.push(note("PhaseChanged", format!("The phase is {phase}")));
    }
    let held = object.metadata.finalizers.iter().flatten().any(|name| name == super::FINALIZER);
    if object.metadata.deletion_timestamp.is_none() && !held && observed.copy.is_none() {
        decision.before.insert(0, Action::AddFinalizer);
    }
    decision
}

fn bound_message(status: &mut StyrminDeploymentStatus) {
    status.message = status.message.take().map(|message| status::bounded(&message));
}

/// Annotations that name this object stay said: Flux removes what is not in Git.
fn latch(object: &StyrminDeployment, status: &mut StyrminDeploymentStatus) {
    let Some(uid) = &object.metadata.uid else { return };
    let annotation = |name: &str| object.metadata.annotations.as_ref()?.get(name);
    let mut latched = status.latched.clone().unwrap_or_default();
    let keep = |name: &str, place: &mut Option<String>| {
        if annotation(name) == Some(uid) {
            *place = Some(uid.clone());
        }
    };
    // A word about an end is one only while there is an end to speak of.
    if object.metadata.deletion_timestamp.is_some() || object.spec.lifecycle == Lifecycle::Deleting {
        keep(super::CONFIRM_DELETE, &mut latched.confirm_delete);
        keep(super::FORCE_DELETE, &mut latched.force_delete);
    }
    // The reference's annotation has any value; it means the object that carries it.
    if let Some(value) = annotation(super::SKIP_TEARDOWN) {
        latched.skip_teardown = (value != "false").then(|| uid.clone());
    }
    status.latched = (latched != Latched::default()).then_some(latched);
}

fn way(observed: &Observed<'_>, now: Timestamp, settings: &Settings) -> Decision {
    let object = observed.object;
    let mut status = object.status.clone().unwrap_or_default();
    status.observed_generation = object.metadata.generation;
    latch(object, &mut status);
    let going = object.metadata.deletion_timestamp.is_some();
    if let Some(why) = &observed.copy {
        // Two objects for one application would fight, and the end of one would be the end of the other's.
        let after = if going { vec![Action::RemoveFinalizer] } else { Vec::new() };
        return Decision { after, ..fail(status, "Copy", why, object.metadata.generation, now) };
    }
    if going || object.spec.lifecycle == Lifecycle::Deleting {
        return teardown::decide(observed, status, now, settings);
    }
    if teardown::left(&status) || status.spec_digest.as_deref() != Some(object.spec.digest().as_str()) {
        return match hook::unfinished(observed, &mut status, now) {
            Some(step) => {
                let message = format!("A newer change waits until the step \"{step}\" has ended");
                status.message = Some(message);
                Decision { status, again: Some(SOON), ..Decision::default() }
            }
            None => begin(observed, status, now, settings),
        };
    }
    rollout(observed, status, now, settings)
}

/// Notes what is acted on from now on.
fn begin(
    observed: &Observed<'_>,
    mut status: StyrminDeploymentStatus,
    now: Timestamp,
    settings: &Settings,
) -> Decision {
    let spec = &observed.object.spec;
    let first = status.phase.is_none();
    let left = teardown::left(&status);
    if left {
        // What was said of that end does not count for the next one.
        status.latched = None;
    }
    let DriverSeen::Here(driver) = observed.driver else {
        // Once: this pass comes again until the driver is there.
        if left || status.instance_id.as_ref() != Some(&spec.instance_id) {
            wait_anew(&mut status, observed.object, now);
        }
        return wait_for_driver(observed, status, now, settings);
    };
    let plan = observed.plan(driver);
    status.instance_id = Some(spec.instance_id.clone());
    status.spec_digest = Some(spec.digest());
    status.rollout_started_at = None;
    status.release_reset_at = None;
    status.phase = Some(phase::PREREQUISITES.into());
    status.message = None;
    for finished in observed.finished_jobs {
        if !status.finished_jobs.contains(finished) {
            status.finished_jobs.push(finished.clone());
        }
    }
    let is_asked_for = |finished: &String| spec.jobs.iter().any(|run| run.id == *finished);
    status.finished_jobs.retain(is_asked_for);
    status.failed_jobs.retain(is_asked_for);
    if steps::hook_has_failed(&status) {
        // What it had stopped was started then, and is stopped again before another attempt.
        for scaled in plan.steps.iter().filter(|one| hooks::scales(&driver.file.spec, &one.kind)) {
            steps::forget(&mut status, &scaled.kind, observed.base());
        }
    }
    steps::begin(&mut status, &plan, observed.base(), now);
    let generation = observed.object.metadata.generation;
    status::on_its_way(&mut status, &["HelmReleaseReady", "Ready"], generation, now);
    status.conditions.retain(|condition| condition.r#type != "HelmReleaseRemediated");
    let what = match plan.workflow {
        Workflow::None if plan.steps.is_empty() => "nothing that was applied changes".to_owned(),
        Workflow::None => "back to what was applied".to_owned(),
        workflow => format!("workflow {}", workflow.as_str()),
    };
    let started = note("RolloutStarted", format!("Instance {}: {what}", spec.instance_id));
    if first && status.steps.iter().all(|step| step.key.is_none()) && observed.wanted.is_ok() {
        // What was observed follows from an earlier status where there is one. Here it rests on nothing that
        // is noted only now, and the status is written before anything is done: one pass less for each of
        // many that come at once.
        let mut decision = rollout(observed, status, now, settings);
        decision.notes.insert(0, started);
        return decision;
    }
    Decision { status, notes: vec![started], again: AT_ONCE, ..Decision::default() }
}

/// A change has arrived, and waits to be begun. What an earlier one has run stays noted until there is a plan.
fn wait_anew(status: &mut StyrminDeploymentStatus, object: &StyrminDeployment, now: Timestamp) {
    let generation = object.metadata.generation;
    status.instance_id = Some(object.spec.instance_id.clone());
    status.phase = Some(phase::PREREQUISITES.into());
    status.rollout_started_at = None;
    steps::wait_anew(status, now);
    status::on_its_way(status, &["HelmReleaseReady", "Ready"], generation, now);
    status.conditions.retain(|condition| condition.r#type != "HelmReleaseRemediated");
}

/// Nothing can be planned without the driver. The instance is noted all the same: people see that
/// the change has arrived and what it waits for.
fn wait_for_driver(
    observed: &Observed<'_>,
    mut status: StyrminDeploymentStatus,
    now: Timestamp,
    settings: &Settings,
) -> Decision {
    let spec = &observed.object.spec;
    let generation = observed.object.metadata.generation;
    let message = driver_missing(observed);
    status.instance_id = Some(spec.instance_id.clone());
    if let DriverSeen::Broken(_) = observed.driver {
        return fail(status, "DriverBroken", &message, generation, now);
    }
    wait(observed, status, ("DriverMissing", &message), now, settings)
}

/// Why the driver cannot be used.
pub(super) fn driver_missing(observed: &Observed<'_>) -> String {
    let driver = &observed.object.spec.driver;
    match observed.driver {
        DriverSeen::Broken(why) => {
            format!("The definition of driver {} {} cannot be read: {why}", driver.name, driver.version)
        }
        _ => format!("Waiting for the definition of driver {} {} to arrive from Git", driver.name, driver.version),
    }
}

/// Something has to arrive. What runs goes on running and stays what it is; only a rollout waits, and not without
/// end.
fn wait(
    observed: &Observed<'_>,
    mut status: StyrminDeploymentStatus,
    (reason, message): (&str, &str),
    now: Timestamp,
    settings: &Settings,
) -> Decision {
    let generation = observed.object.metadata.generation;
    status.message = Some(message.to_owned());
    if !rolls(&status) {
        let mut notes = Vec::new();
        let at_rest = status.phase.as_deref() == Some(phase::READY) || is_failed_since_long(observed, now);
        if at_rest && observed.waiting.is_some() {
            put_back(observed, &mut status, &mut notes, now);
        }
        return Decision { status, after: puts_back(observed), notes, ..Decision::default() };
    }
    let is_new = status.phase.as_deref() == Some(phase::PREREQUISITES);
    if is_new {
        if status.steps.is_empty() {
            // A change of nothing has no step of its own to wait in.
            steps::wait_anew(&mut status, now);
        }
        if let Some(first) = status.steps.iter().position(|step| step.name == plan::PREREQUISITES) {
            steps::run(&mut status, first, now);
            steps::explain(&mut status, first, message);
        }
        if !is_late(&status) {
            status.display_state = Some(status::DEPLOYING.into());
            status::set(&mut status, "Ready", "Unknown", reason, message, generation, now);
        }
    }
    let mut decision = timed(observed.object, status, now, settings, Some(message));
    if !is_new {
        decision.after = puts_back(observed);
    }
    if reason == "SecretsMissing" {
        // No watch shows the Secrets of others; a driver's and a source's arrival is seen.
        decision.no_later(SOON);
    }
    decision
}

fn rollout(
    observed: &Observed<'_>,
    mut status: StyrminDeploymentStatus,
    now: Timestamp,
    settings: &Settings,
) -> Decision {
    let generation = observed.object.metadata.generation;
    let DriverSeen::Here(driver) = observed.driver else {
        return wait_for_driver(observed, status, now, settings);
    };
    if let Some((reason, missing)) = &observed.waiting {
        return wait(observed, status, (*reason, missing), now, settings);
    }
    let wanted = match observed.wanted {
        Ok(wanted) => wanted,
        Err(why) => return fail(status, "RenderFailed", why, generation, now),
    };
    let after = puts_back(observed);
    let mut notes = Vec::new();
    if let Some(network) = observed.network {
        status.endpoints.clone_from(&network.endpoints);
        status.chart_services.clone_from(&network.chart_services);
        let message = post_render::missing(&network.missing_components);
        if status::missing_components(&mut status, message.as_deref(), generation, now) {
            notes.extend(message.map(|message| warning(post_render::CONTAINER_NOT_FOUND, message)));
        }
    }
    if let Some(way) = observed.in_the_way
        && !status.chart_services.contains(&way.name)
    {
        // It is the chart's from now on.
        status.chart_services.push(way.name.clone());
    }
    if status.phase.as_deref() == Some(phase::READY) && is_renewed(&status, wanted) {
        notes.push(renew(&mut status, generation, now));
    }
    let done = status.phase.as_deref() == Some(phase::READY);
    if done || is_failed_since_long(observed, now) {
        put_back(observed, &mut status, &mut notes, now);
    }
    if status::collisions(&mut status, observed.collisions, generation, now) {
        notes.push(warning("AliasCollision", observed.collisions.join("; ")));
    }
    let verdict = match judged(observed, settings) {
        Some(_) if observed.internal_ready => Verdict::Ready,
        Some(verdict) => verdict,
        None => Verdict::Progressing(Seen::default()),
    };
    let mut decision = if done {
        settled(observed, status, verdict, now)
    } else {
        work(observed, driver, wanted, status, &verdict, now, settings)
    };
    if !observed.going.is_empty() {
        decision.no_later(Duration::from_secs(2));
    }
    if observed.object.spec.is_internal() && !observed.internal_ready && !done {
        // No change of a pod leads here.
        decision.no_later(SOON);
    }
    decision.after.splice(0..0, after);
    decision.notes.extend(notes);
    decision
}

/// Makes what is there what should be.
pub(super) fn puts_back(observed: &Observed<'_>) -> Vec<Action> {
    let applied = observed.differing.iter().chain(observed.additions).cloned().map(Action::Apply);
    applied.chain(observed.unwanted.iter().chain(observed.in_the_way).cloned().map(Action::Delete)).collect()
}

/// What Flux says of the release; `None` while it is not the one that is wanted: an older object that a watch
/// still shows says nothing about what was asked for now.
pub(super) fn judged(observed: &Observed<'_>, settings: &Settings) -> Option<Verdict> {
    let reset = observed.object.status.as_ref().and_then(|status| status.release_reset_at.as_deref());
    let judge = |found| {
        let verdict = release::judge(found, observed.failure, settings.release.retries);
        match (reset, verdict) {
            (Some(at), verdict) if release::was_reset(found, at) => verdict,
            (None, verdict) | (_, verdict @ Verdict::Progressing(_)) => verdict,
            // How it ended is of before it was asked to try again.
            _ => Verdict::Progressing(Seen::default()),
        }
    };
    (!differs(observed)).then(|| observed.release.map_or_else(|| Verdict::Progressing(Seen::default()), judge))
}

/// The values that Helm is given are other than when the release became ready: one in a Secret that somebody else
/// keeps is a new one.
pub(super) fn is_renewed(status: &StyrminDeploymentStatus, wanted: &Wanted) -> bool {
    status.rendered_release.as_ref().zip(wanted.rendered()).is_some_and(|(known, now)| known.values != now.values)
}

/// A rollout of the same instance begins.
fn renew(status: &mut StyrminDeploymentStatus, generation: Option<i64>, now: Timestamp) -> Note {
    status.rollout_started_at = None;
    status.release_reset_at = None;
    status.phase = Some(phase::RELEASE.into());
    steps::begin(status, &plan::plan_back(), Base { revision: None, driver: "" }, now);
    status::on_its_way(status, &["HelmReleaseReady", "Ready"], generation, now);
    note("Renewed", "The values of the chart have changed: they are rolled out".into())
}

/// A rollout failed so long ago that the watches show all that it wrote: what differs now, somebody has changed.
fn is_failed_since_long(observed: &Observed<'_>, now: Timestamp) -> bool {
    let status = observed.object.status.as_ref();
    let failed = status.filter(|status| status.phase.as_deref() == Some(phase::FAILED) && observed.trouble.is_none());
    let ready = failed.and_then(|status| status.conditions.iter().find(|condition| condition.r#type == "Ready"));
    let since = ready.and_then(|condition| condition.last_transition_time.parse::<Timestamp>().ok());
    since.is_some_and(|since| now.duration_since(since) > SEEN_BY_THEN)
}

/// Counts what is put back of a deployment at rest, once for each set of objects.
pub(super) fn put_back(
    observed: &Observed<'_>,
    status: &mut StyrminDeploymentStatus,
    notes: &mut Vec<Note>,
    now: Timestamp,
) {
    let generation = observed.object.metadata.generation;
    let waits = observed.waiting.is_some();
    let record = (!observed.recorded && !waits).then(|| "ControllerRevision of what was applied".to_owned());
    // What this agent renders otherwise than the one before, or with other settings, is nobody's edit.
    let rendered = observed.wanted.ok().and_then(Wanted::rendered);
    let is_ours = status.rendered_release.as_ref().zip(rendered).is_some_and(|(known, now)| *known != now);
    let is_edited = |object: &&Value| !(is_ours && object["kind"] == "HelmRelease");
    let names: Vec<String> = observed.differing.iter().filter(is_edited).map(name_of).chain(record).collect();
    let message = format!("Put back {}", names.join(", "));
    // What was applied a moment ago may not be seen yet: what is noted is not counted again.
    if !names.is_empty() && status::put_back(status, &names, &message, generation, now) {
        status.drift_corrections = Some(status.drift_corrections.unwrap_or_default() + 1);
        notes.push(warning("DriftCorrected", message));
    } else if names.is_empty() && observed.going.is_empty() {
        status::nothing_to_put_back(status);
    }
    if let Some(drifted) = observed.release.and_then(release::drifted)
        && status::drifted(status, &drifted, generation)
    {
        status.drift_corrections = Some(status.drift_corrections.unwrap_or_default() + 1);
        notes.push(warning("DriftCorrected", drifted.message));
    }
}

/// A deployment that is ready.
fn settled(observed: &Observed<'_>, mut status: StyrminDeploymentStatus, verdict: Verdict, now: Timestamp) -> Decision {
    let generation = observed.object.metadata.generation;
    match verdict {
        Verdict::Ready => ready(observed, status, now),
        Verdict::Failed { reason, message, seen } => {
            status::copy(&mut status, &seen, generation, now);
            fail(status, &reason, &message, generation, now)
        }
        Verdict::Error { message, seen } => {
            status::copy(&mut status, &seen, generation, now);
            error(status, "Failing", &message, generation, now)
        }
        // Its pods may restart, or Flux puts back drift: the health of the pods says that.
        Verdict::Progressing(_) => Decision { status, ..Decision::default() },
    }
}

/// Goes through the steps until one has to be waited for.
fn work(
    observed: &Observed<'_>,
    driver: &Driver,
    wanted: &Wanted,
    mut status: StyrminDeploymentStatus,
    verdict: &Verdict,
    now: Timestamp,
    settings: &Settings,
) -> Decision {
    let generation = observed.object.metadata.generation;
    let plan = observed.plan(driver);
    // Recorded already, and only the status was not written any more. What the status knows of is another time.
    let recorded = observed.applied == Some(&observed.object.spec) && status.applied_digest != status.spec_digest;
    loop {
        let current = match steps::current(&status, &plan, observed.base()) {
            _ if recorded => None,
            Ok(current) => current,
            // The plan is another one than when the steps were noted.
            Err(_) => return begin(observed, status, now, settings),
        };
        let Some(current) = current else {
            if !status.stopped_components.is_empty() {
                // Of a change that was taken back meanwhile.
                status.stopped_components.clear();
                return Decision { status, again: AT_ONCE, ..Decision::default() };
            }
            if status.rollout_started_at.is_none() && !matches!(verdict, Verdict::Ready) {
                enter(&mut status, &StepKind::HelmRelease);
                if start(observed, &mut status, wanted, verdict, now) {
                    return Decision { status, again: AT_ONCE, ..Decision::default() };
                }
            }
            return match judge_release(observed, status, verdict, None, now, settings) {
                Ok(status) => ready(observed, status, now),
                Err(decision) => *decision,
            };
        };
        let failed = status.phase.as_deref() == Some(phase::FAILED);
        if failed && matches!(current.kind, StepKind::Hook { .. }) && steps::has_failed(&status, current.index) {
            // Only another change gets another attempt.
            return Decision { status, ..Decision::default() };
        }
        match &current.kind {
            StepKind::Prerequisites => steps::succeed(&mut status, current.index, now),
            StepKind::Hook { .. } => {
                enter(&mut status, &current.kind);
                match hook::step(observed, &mut status, &current, driver, Some(verdict), now, settings) {
                    Progress::Done => {}
                    Progress::Stay(stay) => {
                        return Decision { status, after: stay.after, again: stay.again, ..Decision::default() };
                    }
                    Progress::Failed(why) => {
                        // What runs goes on running.
                        status.stopped_components.clear();
                        steps::fail(&mut status, current.index, &why, now);
                        steps::note_run(&mut status, current.index);
                        return fail(status, "HookFailed", &why, generation, now);
                    }
                }
                steps::note_run(&mut status, current.index);
            }
            StepKind::HelmRelease => {
                if wanted.held {
                    // Observed before the steps that come first had ended.
                    return Decision { status, again: AT_ONCE, ..Decision::default() };
                }
                if !failed {
                    enter(&mut status, &current.kind);
                }
                if differs(observed) && observed.trouble.is_some() {
                    // It could not be written: its clock begins when it is.
                    status.rollout_started_at = None;
                } else if status.rollout_started_at.is_none() {
                    steps::run(&mut status, current.index, now);
                    if start(observed, &mut status, wanted, verdict, now) {
                        return Decision { status, again: AT_ONCE, ..Decision::default() };
                    }
                }
                status = match judge_release(observed, status, verdict, Some(current.index), now, settings) {
                    Ok(status) => status,
                    Err(decision) => return *decision,
                };
                steps::succeed(&mut status, current.index, now);
                status.phase = Some(phase::RELEASE.into());
            }
            StepKind::Services => {
                enter(&mut status, &current.kind);
                if let Some(network) = observed.network {
                    status.endpoints.clone_from(&network.endpoints);
                    status.chart_services.clone_from(&network.chart_services);
                } else if !steps::has_begun(&status, current.index) {
                    return Decision { status, again: AT_ONCE, ..Decision::default() };
                }
                // Once it runs, what was seen of the chart's Services is in the status.
                steps::run(&mut status, current.index, now);
                let open = observed.differing.len() + observed.additions.len() + observed.unwanted.len();
                if open > 0 {
                    let mut decision = timed(observed.object, status, now, settings, observed.trouble);
                    decision.no_later(SOON);
                    return decision;
                }
                steps::succeed(&mut status, current.index, now);
            }
            StepKind::Ready => {
                enter(&mut status, &current.kind);
                steps::run(&mut status, current.index, now);
                if !status.stopped_components.is_empty() {
                    // A rollout never ends with components that only an action wanted stopped.
                    status.stopped_components.clear();
                    return Decision { status, again: AT_ONCE, ..Decision::default() };
                }
                return match judge_release(observed, status, verdict, Some(current.index), now, settings) {
                    Ok(status) => ready(observed, status, now),
                    Err(decision) => *decision,
                };
            }
            StepKind::Teardown => steps::succeed(&mut status, current.index, now),
        }
    }
}

/// The clock of a rollout begins, and with it what is said of lateness. `true`: Flux has given up on the very release
/// that is wanted, and is asked to try it again.
fn start(
    observed: &Observed<'_>,
    status: &mut StyrminDeploymentStatus,
    wanted: &Wanted,
    verdict: &Verdict,
    now: Timestamp,
) -> bool {
    let generation = observed.object.metadata.generation;
    status.message = None;
    status.rollout_started_at = Some(now.to_string());
    if is_late(status) {
        status::on_its_way(status, &["Ready"], generation, now);
    }
    let gave_up = matches!(verdict, Verdict::Failed { .. } | Verdict::Error { .. });
    // Flux may call it ready, and what told that it is not is forgotten after an hour: it never was for us.
    let never_ready = || status.rendered_release != wanted.rendered();
    let again = !differs(observed) && (gave_up || observed.release.is_some_and(release::has_failed) && never_ready());
    if again {
        status.release_reset_at = Some(now.to_string());
    }
    again
}

/// The readiness timeout has passed.
fn is_late(status: &StyrminDeploymentStatus) -> bool {
    let late = |condition: &Condition| condition.r#type == "Ready" && condition.reason == READY_TIMEOUT;
    status.conditions.iter().any(late)
}

/// The HelmRelease is not as wanted, or not there.
fn differs(observed: &Observed<'_>) -> bool {
    observed.differing.iter().any(|object| object["kind"] == "HelmRelease")
        || observed.going.iter().any(|name| name.starts_with("HelmRelease "))
}

/// The rollout comes to a step.
fn enter(status: &mut StyrminDeploymentStatus, kind: &StepKind) {
    status.phase = Some(steps::phase_of(kind).into());
    if status.display_state.as_deref() != Some(status::ERROR) {
        status.display_state = Some(status::DEPLOYING.into());
    }
}

/// What the release says. `Ok`: it is ready; `Err`: the decision that follows from what it says instead.
fn judge_release(
    observed: &Observed<'_>,
    mut status: StyrminDeploymentStatus,
    verdict: &Verdict,
    index: Option<usize>,
    now: Timestamp,
    settings: &Settings,
) -> Result<StyrminDeploymentStatus, Box<Decision>> {
    let generation = observed.object.metadata.generation;
    let decision = match verdict {
        // The event that told of the failure is kept for an hour; the conclusion stays.
        Verdict::Ready if observed.failure.is_none() && concluded(&status, observed.release) => {
            Decision { status, ..Decision::default() }
        }
        Verdict::Ready => {
            let message = "Flux reports the release ready";
            status::set(&mut status, "HelmReleaseReady", "True", "FluxReady", message, generation, now);
            status.conditions.retain(|condition| condition.r#type != "HelmReleaseRemediated");
            return Ok(status);
        }
        Verdict::Failed { reason, message, seen } => {
            status::copy(&mut status, seen, generation, now);
            let message = format!("{message}{}", still_stopped(&status));
            fail(status, reason, &message, generation, now)
        }
        Verdict::Error { message, seen } => {
            status::copy(&mut status, seen, generation, now);
            error(status, "Failing", message, generation, now)
        }
        Verdict::Progressing(seen) => progressing(observed, status, seen, index, now, settings),
    };
    Err(Box::new(decision))
}

/// What a release that failed leaves stopped. Flux goes back to the release of before with what an action had
/// stopped in it; started by us, it would run on what later actions may have changed already.
fn still_stopped(status: &StyrminDeploymentStatus) -> String {
    let stopped = &status.stopped_components;
    if stopped.is_empty() {
        return String::new();
    }
    format!(
        "; stopped by an action before the release, and left stopped until a change succeeds: {}",
        stopped.join(", ")
    )
}

/// The rollout failed because Flux never applied the change, and nothing was deployed since.
fn concluded(status: &StyrminDeploymentStatus, release: Option<&Value>) -> bool {
    let failed = |condition: &&Condition| {
        let flux = ["InstallFailed", "UpgradeFailed", post_render::CONTAINER_NOT_FOUND];
        condition.r#type == "Ready" && flux.contains(&condition.reason.as_str())
    };
    let since = status.conditions.iter().find(failed).and_then(|condition| condition.last_transition_time.parse().ok());
    status.phase.as_deref() == Some(phase::FAILED)
        && since.zip(release).is_some_and(|(since, release)| release::deployed_before(release, since))
}

/// Flux works.
fn progressing(
    observed: &Observed<'_>,
    mut status: StyrminDeploymentStatus,
    seen: &Seen,
    index: Option<usize>,
    now: Timestamp,
    settings: &Settings,
) -> Decision {
    let generation = observed.object.metadata.generation;
    status::copy(&mut status, seen, generation, now);
    if status.phase.as_deref() == Some(phase::FAILED) {
        return Decision { status, ..Decision::default() };
    }
    let why = seen.complaint().or(observed.trouble).map(str::to_owned);
    status.message.clone_from(&why);
    if let Some(index) = index {
        steps::run(&mut status, index, now);
        if let Some(why) = &why {
            steps::explain(&mut status, index, why);
        }
    }
    if status.display_state.as_deref() != Some(status::ERROR) {
        status.display_state = Some(status::DEPLOYING.into());
    }
    timed(observed.object, status, now, settings, why.as_deref())
}

/// Becomes an error when the rollout takes too long; the phase stays, since it can still succeed. The time of
/// actions does not count, nor does lateness end one: they have limits of their own. Before there is a HelmRelease to
/// wait for, the time counts from when the change was noted; from when the object was made, if nothing ever was.
fn timed(
    object: &StyrminDeployment,
    status: StyrminDeploymentStatus,
    now: Timestamp,
    settings: &Settings,
    why: Option<&str>,
) -> Decision {
    let limit = SignedDuration::from_secs(i64::from(settings.ready_timeout));
    let started = status.rollout_started_at.as_deref().and_then(|at| at.parse().ok());
    let created = || object.metadata.creation_timestamp.as_ref().map(|at| at.0);
    let noted = || steps::noted(&status).or_else(|| created().filter(|_| status.spec_digest.is_none()));
    let Some(started) = started.or_else(noted) else {
        return Decision { status, ..Decision::default() };
    };
    let left = limit + steps::time_of_hooks(&status, started, now) - now.duration_since(started);
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
    let hook = steps::comes_to_a_hook(&status).then(|| status.steps.clone());
    let mut late = error(status, READY_TIMEOUT, &message, object.metadata.generation, now);
    if let Some(steps) = hook {
        late.status.steps = steps;
    }
    late
}

fn ready(observed: &Observed<'_>, mut status: StyrminDeploymentStatus, now: Timestamp) -> Decision {
    let generation = observed.object.metadata.generation;
    let spec = &observed.object.spec;
    let was = status.phase.clone();
    let message = "Flux reports the release ready";
    status::set(&mut status, "HelmReleaseReady", "True", "FluxReady", message, generation, now);
    status.conditions.retain(|condition| condition.r#type != "HelmReleaseRemediated");
    status::set(&mut status, "Ready", "True", "Ready", "The deployment is ready", generation, now);
    steps::succeed_all(&mut status, now);
    status.phase = Some(phase::READY.into());
    let stopped = spec.lifecycle == Lifecycle::Stopped;
    status.display_state = Some(if stopped { status::STOPPED } else { status::RUNNING }.into());
    status.message = None;
    status.release_reset_at = None;
    status.applied_digest.clone_from(&status.spec_digest);
    status.earlier_steps.clear();
    if let Some(rendered) = observed.wanted.ok().and_then(Wanted::rendered) {
        status.rendered_release = Some(rendered);
    }
    let news = was.as_deref() != Some(phase::READY);
    // Recorded before the phase says so: a deployment that is ready has its record, and no other one.
    let before = if news || !observed.recorded { vec![Action::RecordApplied] } else { Vec::new() };
    let notes = if news { vec![note("Ready", format!("Instance {} is ready", spec.instance_id))] } else { Vec::new() };
    let after = observed.stale.iter().cloned().map(Action::Delete).collect();
    Decision { before, status, after, notes, ..Decision::default() }
}

pub(super) fn fail(
    mut status: StyrminDeploymentStatus,
    reason: &str,
    message: &str,
    generation: Option<i64>,
    now: Timestamp,
) -> Decision {
    let news = status.phase.as_deref() != Some(phase::FAILED);
    status.phase = Some(phase::FAILED.into());
    let mut decision = error(status, reason, message, generation, now);
    decision.notes = if news { vec![warning("RolloutFailed", message.to_owned())] } else { Vec::new() };
    decision
}

pub(super) fn error(
    mut status: StyrminDeploymentStatus,
    reason: &str,
    message: &str,
    generation: Option<i64>,
    now: Timestamp,
) -> Decision {
    let same = |condition: &Condition| {
        condition.r#type == "Ready" && condition.status == "False" && condition.reason == reason
    };
    let news = !status.conditions.iter().any(same);
    status.display_state = Some(status::ERROR.into());
    status.message = Some(message.to_owned());
    status::set(&mut status, "Ready", "False", reason, message, generation, now);
    steps::fail_first(&mut status, message, now);
    let notes = if news { vec![warning(reason, message.to_owned())] } else { Vec::new() };
    Decision { status, notes, ..Decision::default() }
}

pub(super) fn note(reason: &str, message: String) -> Note {
    Note { warning: false, reason: reason.into(), message }
}

pub(super) fn warning(reason: &str, message: String) -> Note {
    Note { warning: true, ..note(reason, message) }
}

fn name_of(object: &Value) -> String {
    let part = |pointer: &str| object.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
    format!("{} {}", part("/kind"), part("/metadata/name"))
}
