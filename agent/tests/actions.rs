//! Steps of drivers' actions: their order, their ends, and that none that ended well is run twice.

mod case;

use case::{Case, leftover, spec};
use serde_json::json;
use styrmin_agent::operator::decide::{Action, Network, ObjectKey, phase};
use styrmin_agent::operator::hook::{Execution, HookState};
use styrmin_agent::operator::{FINALIZER, FORCE_DELETE, SKIP_TEARDOWN, steps};
use styrmin_renderer::spec::{Lifecycle, StyrminDeploymentSpec};

const EVERY_OCCASION: &str = "
- {name: after, hook: setup, mode: post, steps: [{run_job: {component: database, command: [a]}}]}
- {name: between, hook: setup, mode: core, steps: [{run_job: {component: database, command: [b]}}]}
- {name: first, hook: setup, mode: pre, steps: [{run_job: {component: database, command: [c]}}, {wait: {seconds: 10}}]}
- {name: upgrade, hook: upgrade, mode: pre, steps: [{run_job: {component: database, command: [d]}}]}
- {name: end, hook: before_delete, mode: pre, steps: [{run_job: {component: database, command: [e]}}]}
- {name: backup, hook: job, mode: post, steps: [{run_job: {component: database, command: [f]}}]}
";

const STOPS: &str = "
- name: migrate
  hook: setup
  mode: pre
  steps:
  - stop_components: [database]
  - execute: {component: database, command: [migrate], timeout_seconds: 60}
  - start_components: [database]
";

fn job(name: &str) -> HookState {
    HookState::Job(json!({ "kind": "Job", "metadata": { "name": name } }))
}

fn command() -> HookState {
    HookState::Command(Execution {
        key: String::new(),
        attempt: 0,
        namespace: "n".into(),
        pod: "p".into(),
        container: "c".into(),
        command: vec!["migrate".into()],
        timeout_seconds: 60,
    })
}

/// The Job that a decision starts.
fn started(actions: &[Action]) -> Vec<&str> {
    fn name(action: &Action) -> Option<&str> {
        match action {
            Action::Apply(object) if object["kind"] == "Job" => object["metadata"]["name"].as_str(),
            _ => None,
        }
    }
    actions.iter().filter_map(name).collect()
}

/// The first step, which comes before the release, has begun.
fn first_begun() -> Case {
    let mut case = Case::with_actions(EVERY_OCCASION);
    case.wanted.held = true;
    case.settle();
    case.sees(job("first"));
    case.pass();
    case
}

/// A step that begins, runs and ends.
fn through(case: &mut Case, name: &str) {
    case.sees(job(name));
    assert_eq!(started(&case.pass().after), [name]);
    case.sees(HookState::Running);
    case.settle();
    assert!(case.steps().iter().any(|step| step.contains("Running 1")), "{:?}", case.steps());
    case.sees(HookState::Succeeded);
    case.settle();
}

#[test]
fn steps_come_in_strict_order_before_between_and_after_the_release() {
    let mut case = Case::with_actions(EVERY_OCCASION);
    case.wanted.held = true;
    case.settle();
    assert!(!steps::release_allowed(case.status()));
    assert_eq!(case.phase(), phase::PREREQUISITES);
    through(&mut case, "first");
    // The pause is of ten seconds.
    assert!(!steps::release_allowed(case.status()));
    case.after(9);
    case.settle();
    assert!(!steps::release_allowed(case.status()));
    case.after(2);
    case.settle();
    assert!(steps::release_allowed(case.status()));
    case.wanted.held = false;
    case.settle();
    assert_eq!((case.phase().as_str(), case.status().rollout_started_at.is_some()), (phase::RELEASE, true));
    case.flux_ready();
    case.settle();
    assert_eq!(case.phase(), phase::RELEASE, "the step after it belongs to it");
    through(&mut case, "between");
    assert_eq!(case.phase(), phase::SERVICES);
    through(&mut case, "after");
    assert_eq!(case.phase(), phase::READY);
    let wanted = [
        "Run first (1 of 2) Succeeded 1",
        "Run first (2 of 2) Succeeded 1",
        "Run between Succeeded 1",
        "Run after Succeeded 1",
    ];
    assert_eq!(case.steps(), wanted);
    let ends: Vec<_> = case.status().steps.iter().map(|step| step.ended_at.clone().unwrap()).collect();
    assert!(ends.is_sorted(), "{ends:?}");
}

#[test]
fn a_failing_step_ends_the_rollout_before_the_release_and_the_next_change_tries_again() {
    let mut case = Case::with_actions(EVERY_OCCASION);
    case.wanted.held = true;
    case.flux_ready();
    case.settle();
    through(&mut case, "first");
    case.after(11);
    // As if the second were a Job as well.
    case.change("two");
    case.settle();
    case.after(11);
    case.settle();
    case.wanted.held = false;
    case.settle();
    case.sees(HookState::Failed("Job n/j failed: exit code 1\nno such table".into()));
    case.settle();
    assert_eq!((case.phase().as_str(), case.reason().as_str()), (phase::FAILED, "HookFailed"));
    assert_eq!(case.status().message.as_deref(), Some("Job n/j failed: exit code 1\nno such table"));
    assert_eq!(case.steps()[2], "Run between Failed 1");
    // Only another change gets another attempt.
    case.after(3600);
    case.sees(job("again"));
    assert_eq!(case.settle().after, []);
    case.change("three");
    case.settle();
    assert_eq!(
        case.steps()[..3],
        ["Run first (1 of 2) Succeeded 1", "Run first (2 of 2) Succeeded 1", "Run between Pending 2"]
    );
    case.sees(job("again"));
    assert_eq!(started(&case.pass().after), ["again"]);
}

#[test]
fn what_failed_before_the_release_leaves_it_untouched() {
    let mut case = Case::with_actions(EVERY_OCCASION);
    case.wanted.held = true;
    case.settle();
    case.sees(HookState::Failed("no".into()));
    case.settle();
    assert_eq!((case.phase().as_str(), steps::release_allowed(case.status())), (phase::FAILED, false));
    assert_eq!(case.status().rollout_started_at, None);
}

#[test]
fn a_newer_change_lets_the_step_finish_and_never_runs_it_again() {
    let mut case = first_begun();
    case.sees(HookState::Running);
    case.settle();
    case.change("two");
    let waits = case.settle();
    assert_eq!(waits.status.instance_id.as_deref(), Some("one"));
    assert!(waits.status.message.unwrap().contains("waits until the step \"Run first (1 of 2)\""));
    case.sees(HookState::Succeeded);
    case.settle();
    assert_eq!(case.status().instance_id.as_deref(), Some("two"));
    assert_eq!(case.steps()[0], "Run first (1 of 2) Succeeded 1", "run once, for the change that was superseded");
    // Superseded again, and applied: what comes next is planned from what was applied.
    case.wanted.held = false;
    case.after(11);
    case.flux_ready();
    case.settle();
    through(&mut case, "between");
    through(&mut case, "after");
    case.change("three");
    case.settle();
    assert_eq!((case.phase().as_str(), case.steps().len()), (phase::READY, 0), "an update has no setup");
}

#[test]
fn a_job_is_applied_again_after_a_restart_and_a_command_gets_another_attempt() {
    let mut case = first_begun();
    // Cut off between the status and the Job: the very same is applied again.
    case.sees(job("first"));
    assert_eq!(started(&case.pass().after), ["first"]);
    assert_eq!(case.steps()[0], "Run first (1 of 2) Running 1");

    let mut case = Case::with_actions(STOPS);
    case.flux_ready();
    case.settle();
    case.sees(command());
    let begun = case.pass();
    assert!(matches!(&begun.after[..], [Action::Execute(execution)] if execution.attempt == 1));
    // The process that began it is gone, and nobody knows how it ended.
    case.sees(command());
    let again = case.pass();
    assert!(matches!(&again.after[..], [Action::Execute(execution)] if execution.attempt == 2));
    let step = &case.status().steps[2];
    assert_eq!((step.attempt, step.message.as_deref()), (2, Some("The agent was restarted while attempt 1 ran")));
}

#[test]
fn components_stop_through_the_release_and_never_stay_stopped() {
    let mut case = Case::with_actions(STOPS);
    case.flux_ready();
    case.wanted.held = true;
    case.pass();
    case.pass();
    assert_eq!(case.status().stopped_components, ["database"]);
    // The release is to be changed first.
    case.differing = vec![case.wanted.release.clone()];
    case.settle();
    assert_eq!(case.steps()[0], "Run migrate (1 of 3) Running 1");
    case.differing.clear();
    case.settle();
    assert_eq!(case.steps()[..2], ["Run migrate (1 of 3) Succeeded 1", "Run migrate (2 of 3) Pending 1"]);
    // No pod is ready: it waits, and for a time only.
    case.sees(HookState::NotYet("no pod of component database is ready".into()));
    case.settle();
    assert_eq!(case.status().steps[2].message.as_deref(), Some("no pod of component database is ready"));
    case.after(61);
    case.settle();
    assert_eq!((case.phase().as_str(), case.status().stopped_components.len()), (phase::FAILED, 0));

    let mut case = Case::with_actions(STOPS);
    case.flux_ready();
    case.settle();
    case.sees(command());
    case.pass();
    case.sees(HookState::Succeeded);
    case.settle();
    assert_eq!((case.phase().as_str(), case.status().stopped_components.len()), (phase::READY, 0));
    assert_eq!(case.steps()[2], "Run migrate (3 of 3) Succeeded 1");
}

#[test]
fn what_never_ends_fails_at_its_limit() {
    let mut case = first_begun();
    case.sees(HookState::Running);
    // Its own limit is 300 s, and Kubernetes needs a moment to say so.
    case.after(320);
    case.settle();
    assert_eq!(case.phase(), phase::PREREQUISITES);
    case.after(20);
    case.sees(HookState::Running);
    case.settle();
    assert_eq!(case.phase(), phase::FAILED, "{:?}", case.status().message);
    assert!(case.status().message.as_ref().unwrap().contains("did not end within"));
}

#[test]
fn a_requested_run_happens_once_however_it_ends() {
    for (ends, phase_after) in [(HookState::Succeeded, phase::READY), (HookState::Failed("no".into()), phase::FAILED)] {
        let mut case = Case::with_actions(EVERY_OCCASION).ready_with_setup();
        case.object.spec = spec("two", json!([{ "id": "run-1", "action": "backup" }]));
        case.object.metadata.generation = Some(5);
        case.settle();
        assert_eq!(case.steps(), ["Run backup Pending 1"]);
        case.sees(job("backup"));
        case.pass();
        case.sees(ends);
        case.settle();
        assert_eq!(
            (case.phase().as_str(), case.status().finished_jobs.as_slice()),
            (phase_after, &["run-1".to_owned()][..])
        );
        // The next change still names the run.
        case.object.spec = spec("three", json!([{ "id": "run-1", "action": "backup" }]));
        case.object.spec.context = json!({ "more": true });
        case.object.metadata.generation = Some(6);
        case.settle();
        assert_eq!((case.phase().as_str(), case.steps().len()), (phase::READY, 0));
        // Also for an object whose status was lost.
        case.object.status = None;
        case.settle();
        assert_eq!((case.phase().as_str(), case.steps().len()), (phase::READY, 0));
    }
}

#[test]
fn actions_come_before_a_teardown_and_are_tried_again_until_somebody_says_force() {
    let mut case = Case::with_actions(EVERY_OCCASION).ready_with_setup().going();
    case.confirmed = Some("the deletion was requested");
    case.leftovers = vec![leftover("HelmRelease", false)];
    case.settle();
    assert_eq!(case.steps(), ["Run end Pending 1"]);
    case.sees(job("end"));
    assert_eq!(started(&case.pass().after), ["end"]);
    case.sees(HookState::Failed("no space".into()));
    let failed = case.settle();
    assert_eq!((case.phase().as_str(), failed.after.len()), (phase::DELETING, 0));
    assert!(case.status().message.as_ref().unwrap().contains("no space"));
    // Pauses grow.
    case.after(29);
    case.settle();
    assert_eq!(case.steps(), ["Run end Failed 1"]);
    case.after(2);
    case.settle();
    assert_eq!(case.steps(), ["Run end Running 2"]);
    case.sees(HookState::Failed("no space".into()));
    case.settle();
    case.after(31);
    case.settle();
    assert_eq!(case.steps(), ["Run end Failed 2"]);
    // A word that means another object means nothing.
    let say = |case: &mut Case, uid: &str| {
        case.object.metadata.annotations = Some([(FORCE_DELETE.to_owned(), uid.to_owned())].into());
    };
    say(&mut case, "uid-of-another");
    case.settle();
    assert_eq!(case.steps(), ["Run end Failed 2"]);
    say(&mut case, "uid-1");
    case.pass();
    // Flux has removed the annotation, which is not in Git.
    case.object.metadata.annotations = None;
    let removes = case.pass();
    assert_eq!(
        (case.steps(), removes.after),
        (vec!["Run end Skipped 2".to_owned()], vec![Action::Delete(case.leftovers[0].object.clone())])
    );
}

#[test]
fn an_application_that_never_ran_has_nothing_that_an_action_could_save() {
    let mut case = Case::with_actions(EVERY_OCCASION);
    case.object.metadata.finalizers = Some(vec![styrmin_agent::operator::FINALIZER.into()]);
    case.wanted.held = true;
    case.settle();
    let mut case = case.going();
    case.confirmed = Some("the deletion was requested");
    case.leftovers = vec![leftover("HelmRelease", false)];
    case.pass();
    assert_eq!(case.pass().after.len(), 1);
    assert_eq!(case.steps().len(), 0);
}

#[test]
fn a_teardown_waits_for_the_step_that_runs() {
    let mut case = Case::with_actions(EVERY_OCCASION);
    case.object.metadata.finalizers = Some(vec![styrmin_agent::operator::FINALIZER.into()]);
    case.wanted.held = true;
    case.settle();
    case.sees(job("first"));
    case.pass();
    case.sees(HookState::Running);
    let mut case = case.going();
    case.confirmed = Some("the deletion was requested");
    case.leftovers = vec![leftover("HelmRelease", false)];
    let waits = case.settle();
    assert_eq!(waits.after, []);
    assert!(case.status().message.as_ref().unwrap().contains("waits until the step"));
    case.sees(HookState::Failed("no".into()));
    case.pass();
    assert_eq!(case.pass().after.len(), 1);
}

#[test]
fn a_skipped_teardown_leaves_the_application() {
    let mut case = Case::new().ready();
    case.object.metadata.annotations = Some([(SKIP_TEARDOWN.to_owned(), "true".to_owned())].into());
    case.settle();
    // Flux removed the annotation and then the object.
    case.object.metadata.annotations = None;
    let mut case = case.going();
    case.leftovers = vec![leftover("HelmRelease", false)];
    case.confirmed = Some("the deletion was requested");
    assert_eq!(case.pass().after, [Action::RemoveFinalizer]);
    // Another object of the same name was never meant.
    let mut other = Case::new();
    other.object.status = case.object.status.clone();
    other.object.metadata.uid = Some("uid-2".into());
    other.object.metadata.finalizers.clone_from(&case.object.metadata.finalizers);
    let mut other = other.going();
    other.leftovers = vec![leftover("HelmRelease", false)];
    assert_eq!(other.pass().after, []);
    assert_eq!(other.reason(), "NotConfirmed");
}

#[test]
fn a_stopped_deployment_is_ready_and_says_that_it_is_stopped() {
    let mut case = Case::new().ready();
    case.object.spec.lifecycle = Lifecycle::Stopped;
    case.settle();
    assert_eq!((case.phase().as_str(), case.status().display_state.as_deref()), (phase::READY, Some("Stopped")));
    case.object.spec.lifecycle = Lifecycle::Running;
    case.settle();
    assert_eq!(case.status().display_state.as_deref(), Some("Running"));
}

#[test]
fn one_ready_pod_is_enough_for_a_deployment_of_our_own() {
    let mut case = Case::new();
    case.object.spec.context = json!({ "deployment": { "internal": true } });
    case.settle();
    case.release =
        Some(json!({ "metadata": { "generation": 1 }, "status": { "lastAttemptedGeneration": 1, "conditions": [
        { "type": "Stalled", "status": "True", "reason": "RetriesExceeded", "message": "m", "observedGeneration": 1 },
    ] } }));
    let stalled = case.release.clone();
    let waits = case.settle();
    assert_eq!(case.phase(), phase::FAILED);
    assert!(waits.again.is_some_and(|again| again.as_secs() <= 5), "no change of a pod leads here");
    let mut case = Case { internal_ready: true, ..case };
    case.object.status = None;
    case.release = None;
    case.pass();
    case.release = stalled;
    case.settle();
    assert_eq!(case.phase(), phase::READY);
}

#[test]
fn services_follow_the_release_and_hold_what_the_chart_showed() {
    let mut case = Case::new();
    case.flux_ready();
    case.network = None;
    case.settle();
    assert_eq!(case.phase(), phase::SERVICES);
    case.network = Some(Network {
        endpoints: styrmin_renderer::network::declared(&case.driver.file.spec),
        chart_services: vec!["database".into()],
        missing_components: Vec::new(),
    });
    case.differing = vec![json!({ "kind": "Service", "metadata": { "name": "postgresql" } })];
    case.additions = vec![json!({ "kind": "Service", "metadata": { "name": "web" } })];
    let unwanted = ObjectKey {
        version: "v1".into(),
        kind: "Service".into(),
        namespace: "n".into(),
        name: "old".into(),
        uid: None,
    };
    case.unwanted = vec![unwanted.clone()];
    let written = case.pass();
    let both = [&case.differing[0], &case.additions[0]].map(|object| Action::Apply(object.clone()));
    assert_eq!(written.after[..2], both);
    assert_eq!(written.after[2..], [Action::Delete(unwanted)]);
    assert_eq!((case.phase().as_str(), case.status().endpoints.len()), (phase::SERVICES, 1));
    (case.differing, case.additions, case.unwanted) = (Vec::new(), Vec::new(), Vec::new());
    case.settle();
    assert_eq!(
        (case.phase().as_str(), &case.status().chart_services[..]),
        (phase::READY, &["database".to_owned()][..])
    );
    // An alias for a deployment that came later is no drift.
    case.additions = vec![json!({ "kind": "Service", "metadata": { "name": "web" } })];
    assert_eq!((case.pass().after.len(), case.status().drift_corrections), (1, None));
}

#[test]
fn what_is_in_the_charts_way_goes_and_is_not_made_again() {
    let mut case = Case::new().ready();
    let way = ObjectKey {
        version: "v1".into(),
        kind: "Service".into(),
        namespace: "n".into(),
        name: "web".into(),
        uid: None,
    };
    case.in_the_way = Some(way.clone());
    let decision = case.pass();
    assert_eq!(
        (decision.after, &case.status().chart_services[..]),
        (vec![Action::Delete(way)], &["web".to_owned()][..])
    );
}

#[test]
fn a_name_that_is_taken_is_reported_until_it_is_free() {
    let mut case = Case::new().ready();
    case.collisions = vec!["the service \"web\" of others has no alias: the chart has a Service of this name".into()];
    let told = case.pass();
    assert_eq!((told.notes.len(), told.notes[0].reason.as_str()), (1, "AliasCollision"));
    assert_eq!(case.pass().notes, [], "once");
    assert!(case.status().conditions.iter().any(|one| one.r#type == "AliasCollision" && one.status == "True"));
    assert_eq!(case.phase(), phase::READY);
    case.collisions.clear();
    case.pass();
    assert!(!case.status().conditions.iter().any(|one| one.r#type == "AliasCollision"));
}

#[test]
fn a_change_that_is_taken_back_leaves_nothing_stopped() {
    let mut case = Case::with_actions(&STOPS.replace("setup", "upgrade")).ready();
    let before = case.object.spec.clone();
    case.object.spec.application_version = "18".into();
    case.object.spec.instance_id = "two".into();
    case.pass();
    case.pass();
    assert_eq!(case.status().stopped_components, ["database"]);
    // Somebody reverts to what runs.
    case.object.spec = before;
    case.settle();
    assert_eq!((case.phase().as_str(), case.status().stopped_components.len()), (phase::READY, 0));
}

#[test]
fn components_are_stopped_again_before_another_attempt() {
    let mut case = Case::with_actions(STOPS);
    case.flux_ready();
    case.settle();
    case.sees(command());
    case.pass();
    case.sees(HookState::Failed("no".into()));
    case.settle();
    assert_eq!((case.phase().as_str(), case.status().stopped_components.len()), (phase::FAILED, 0));
    case.change("two");
    case.pass();
    case.pass();
    assert_eq!(case.status().stopped_components, ["database"]);
    assert_eq!(case.steps()[..2], ["Run migrate (1 of 3) Running 2", "Run migrate (2 of 3) Pending 2"]);
}

#[test]
fn a_word_about_an_end_does_not_outlive_it() {
    let mut case = Case::new().ready();
    let say = [(styrmin_agent::operator::CONFIRM_DELETE.to_owned(), "uid-1".to_owned())];
    case.object.metadata.annotations = Some(say.into());
    case.settle();
    assert_eq!(case.status().latched, None, "nothing is to end");
    case.object.spec.lifecycle = Lifecycle::Deleting;
    case.settle();
    assert_eq!(case.phase(), phase::DELETED);
    case.object.metadata.annotations = None;
    case.object.spec.lifecycle = Lifecycle::Running;
    case.settle();
    assert_eq!((case.phase().as_str(), &case.status().latched), (phase::READY, &None));
    let mut case = case.going();
    case.leftovers = vec![leftover("HelmRelease", false)];
    assert_eq!((case.settle().after, case.reason().as_str()), (vec![], "NotConfirmed"));
}

#[test]
fn live_data_is_not_set_up_again_when_the_record_of_it_is_gone() {
    let mut case = Case::with_actions(EVERY_OCCASION).ready_with_setup();
    assert_eq!(case.status().applied_digest, case.status().spec_digest);
    // Together with a change: what was applied is known to nobody.
    (case.applied, case.revision) = (None, None);
    case.change("two");
    case.settle();
    assert_eq!(case.steps(), ["Run upgrade Pending 1"], "what another version may need is done");
    // And an end still has its actions.
    let mut case = Case::with_actions(EVERY_OCCASION).ready_with_setup().going();
    (case.applied, case.revision) = (None, None);
    case.confirmed = Some("the deletion was requested");
    case.leftovers = vec![leftover("HelmRelease", false)];
    case.settle();
    assert_eq!(case.steps(), ["Run end Pending 1"]);
    case.sees(HookState::Succeeded);
    let removes = case.settle();
    assert_eq!(removes.after, [Action::Delete(case.leftovers[0].object.clone())]);
    assert_eq!(case.status().applied_digest, None, "the record goes with the rest");
}

#[test]
fn a_release_that_fails_after_a_stop_says_what_stays_stopped() {
    let stops = "[{name: migrate, hook: setup, mode: pre, steps: [{stop_components: [database]}]}]";
    let mut case = Case::with_actions(stops);
    case.wanted.held = true;
    case.flux_ready();
    case.settle();
    assert_eq!(case.steps(), ["Run migrate Succeeded 1"]);
    case.wanted.held = false;
    case.differing = vec![case.wanted.release.clone()];
    case.settle();
    case.differing.clear();
    let is = |kind: &str, status: &str, reason: &str| json!({ "type": kind, "status": status, "reason": reason, "message": "boom", "observedGeneration": 1 });
    case.release = Some(json!({ "metadata": { "generation": 1 }, "status": {
        "observedGeneration": 1, "lastAttemptedGeneration": 1, "upgradeFailures": 4,
        "conditions": [is("Ready", "False", "UpgradeFailed"), is("Stalled", "True", "RetriesExceeded"),
            is("Released", "False", "UpgradeFailed")] } }));
    case.settle();
    assert_eq!(case.phase(), phase::FAILED);
    let message = case.status().message.clone().unwrap();
    assert!(message.ends_with("left stopped until a change succeeds: database"), "{message}");
}

#[test]
fn the_time_of_an_action_is_not_that_of_the_release() {
    let mut case = Case::with_actions(
        "[{name: b, hook: setup, mode: core, steps: [{run_job: {component: database, command: [b]}}]}]",
    );
    case.flux_ready();
    case.settle();
    case.sees(job("b"));
    case.pass();
    case.sees(HookState::Running);
    case.settle();
    case.after(400);
    case.sees(HookState::Succeeded);
    // A policy is still to be written.
    case.differing = vec![json!({ "kind": "NetworkPolicy", "metadata": { "name": "p" } })];
    case.settle();
    assert_eq!((case.phase().as_str(), case.status().display_state.as_deref()), (phase::SERVICES, Some("Deploying")));
    case.after(271);
    case.pass();
    assert_eq!((case.reason().as_str(), case.status().display_state.as_deref()), ("ReadyTimeout", Some("Error")));
}

#[test]
fn components_that_never_stop_fail_the_step() {
    let mut case = Case::with_actions(STOPS);
    case.wanted.held = true;
    case.differing = vec![case.wanted.release.clone()];
    case.release = Some(json!({ "metadata": { "generation": 1 }, "status": { "conditions": [
        { "type": "Ready", "status": "False", "reason": "SourceNotReady", "message": "no chart", "observedGeneration": 1 }] } }));
    case.settle();
    case.differing.clear();
    case.after(2429);
    case.settle();
    assert_eq!(case.steps()[0], "Run migrate (1 of 3) Running 1");
    let waits = case.status().steps.iter().find(|step| step.key.is_some()).unwrap().message.clone();
    assert_eq!(waits.as_deref(), Some("Waiting for database to be stopped: no chart"));
    case.after(2);
    case.settle();
    assert_eq!((case.phase().as_str(), case.reason().as_str()), (phase::FAILED, "HookFailed"));
    assert_eq!(case.status().message.as_deref(), Some("database could not be stopped within 2430 s: no chart"));
}

#[test]
fn lateness_ends_no_action() {
    let mut case = Case::with_actions(STOPS);
    case.wanted.held = true;
    case.differing = vec![case.wanted.release.clone()];
    // It is late already when the action begins.
    case.missing = Some("Waiting for key password of Secret e/s".into());
    case.settle();
    case.after(280);
    case.settle();
    assert_eq!(case.reason(), "ReadyTimeout");
    case.missing = None;
    case.settle();
    assert_eq!(case.steps()[0], "Run migrate (1 of 3) Running 1");
    case.after(1);
    case.object.status = case.told("reading Secret e/s: 500").map(|(status, _)| status);
    assert!(case.status().message.as_ref().unwrap().ends_with("reading Secret e/s: 500"));
    assert_eq!(case.steps()[0], "Run migrate (1 of 3) Running 1");
}

#[test]
fn an_object_that_is_put_back_goes_when_its_action_has_ended() {
    let mut case = first_begun();
    case.sees(HookState::Running);
    let mut case = case.going();
    case.object.metadata.finalizers = Some(vec![FINALIZER.into()]);
    case.restored = true;
    assert_eq!(case.pass().after, []);
    case.sees(HookState::Succeeded);
    assert_eq!(case.pass().after, [Action::RemoveFinalizer, Action::ReapplyFolder]);
}

#[test]
fn a_stop_waits_for_the_pods_that_still_end() {
    let mut case = Case::with_actions(STOPS);
    case.flux_ready();
    case.still_there = vec!["postgresql-0".into()];
    case.settle();
    assert_eq!(case.steps()[0], "Run migrate (1 of 3) Running 1");
    let says = "Waiting for database to be stopped: still there: pod postgresql-0";
    assert_eq!(case.status().steps[1].message.as_deref(), Some(says));
    case.still_there.clear();
    case.settle();
    assert_eq!(case.steps()[..2], ["Run migrate (1 of 3) Succeeded 1", "Run migrate (2 of 3) Pending 1"]);
    // Not without end.
    let mut case = Case::with_actions(STOPS);
    case.flux_ready();
    case.still_there = vec!["postgresql-0".into()];
    case.settle();
    case.after(86_400);
    case.settle();
    assert_eq!((case.phase().as_str(), case.reason().as_str()), (phase::FAILED, "HookFailed"));
    assert!(case.status().message.as_ref().unwrap().ends_with("still there: pod postgresql-0"));
}

/// Another version than what was applied is asked for.
fn upgrade(case: &mut Case, applied: &StyrminDeploymentSpec, instance: &str) {
    case.object.spec = applied.clone();
    case.object.spec.instance_id = instance.into();
    case.object.spec.application_version = "18".into();
    case.object.metadata.generation = case.object.metadata.generation.map(|generation| generation + 1);
    case.settle();
}

#[test]
fn what_failed_before_a_way_back_is_another_attempt_when_it_is_asked_for_again() {
    let mut case = Case::with_actions(EVERY_OCCASION).ready_with_setup();
    let before = case.object.spec.clone();
    case.applied = Some(before.clone());
    upgrade(&mut case, &before, "two");
    case.sees(HookState::Failed("no such table".into()));
    case.settle();
    assert_eq!((case.phase().as_str(), case.steps()), (phase::FAILED, vec!["Run upgrade Failed 1".to_owned()]));
    // Back, which takes a while: Flux has not done it yet.
    case.object.spec = before.clone();
    case.object.spec.instance_id = "three".into();
    case.release.as_mut().unwrap()["status"]["conditions"][0]["status"] = "Unknown".into();
    case.settle();
    assert_eq!((case.steps().len(), case.status().earlier_steps.len()), (0, 1));
    // Asked for again, the Job of the first attempt is there still.
    upgrade(&mut case, &before, "four");
    assert_eq!((case.steps(), case.status().earlier_steps.len()), (vec!["Run upgrade Pending 2".to_owned()], 0));
    case.sees(HookState::Succeeded);
    case.flux_ready();
    case.settle();
    assert_eq!(case.phase(), phase::READY);
    // When the way back has come to its end, nothing is remembered of it.
    case.applied = Some(before.clone());
    upgrade(&mut case, &before, "five");
    case.sees(HookState::Failed("no such table".into()));
    case.settle();
    case.object.spec = before.clone();
    case.object.spec.instance_id = "six".into();
    case.settle();
    assert_eq!((case.phase().as_str(), &case.status().earlier_steps[..]), (phase::READY, &[][..]));
    upgrade(&mut case, &before, "seven");
    assert_eq!(case.steps(), ["Run upgrade Pending 1"]);
}

#[test]
fn components_are_stopped_again_after_a_way_back() {
    let mut case = Case::with_actions(&STOPS.replace("setup", "upgrade")).ready();
    let before = case.object.spec.clone();
    case.applied = Some(before.clone());
    upgrade(&mut case, &before, "two");
    assert_eq!(case.steps()[0], "Run migrate (1 of 3) Succeeded 1");
    case.sees(HookState::Failed("no such table".into()));
    case.settle();
    case.object.spec = before.clone();
    case.object.spec.instance_id = "three".into();
    case.release.as_mut().unwrap()["status"]["conditions"][0]["status"] = "Unknown".into();
    case.settle();
    assert_eq!((case.steps().len(), case.status().stopped_components.len()), (0, 0));
    upgrade(&mut case, &before, "four");
    assert_eq!(case.status().stopped_components, ["database"]);
    assert_eq!(case.steps()[..2], ["Run migrate (1 of 3) Running 1", "Run migrate (2 of 3) Pending 2"]);
}

#[test]
fn what_is_set_for_a_component_that_the_chart_lacks_is_told() {
    let mut case = Case::new();
    case.flux_ready();
    let missing = vec!["database".to_owned()];
    case.network = Some(Network { missing_components: missing, ..Network::default() });
    let told: Vec<_> = (0..4).flat_map(|_| case.pass().notes).filter(|note| note.warning).collect();
    assert_eq!((told.len(), told[0].reason.as_str()), (1, "COMPONENT_CONTAINER_NOT_FOUND"), "once");
    assert!(told[0].message.contains("nothing of component database, "), "{}", told[0].message);
    assert_eq!(
        (case.phase().as_str(), case.condition("OverridesMissed").map(|one| one.status.as_str())),
        (phase::READY, Some("True"))
    );
    case.network = Some(Network::default());
    case.settle();
    assert_eq!(case.condition("OverridesMissed"), None);
}

#[test]
fn a_requested_run_that_ends_while_something_newer_waits_has_ended() {
    for (ends, failed) in [(HookState::Succeeded, vec![]), (HookState::Failed("no".into()), vec!["r1".to_owned()])] {
        let mut case = Case::with_actions(EVERY_OCCASION).ready_with_setup();
        case.applied = Some(case.object.spec.clone());
        let asked = json!([{ "id": "r1", "action": "backup" }]);
        case.object.spec = spec("two", asked.clone());
        case.object.metadata.generation = Some(2);
        case.settle();
        assert_eq!(case.steps(), ["Run backup Pending 1"]);
        case.sees(job("backup"));
        case.pass();
        case.sees(HookState::Running);
        case.settle();
        // Another driver comes: its steps have other keys.
        case.object.spec = spec("three", asked);
        case.object.spec.driver.digest = "sha256:other".into();
        case.driver.digest = "sha256:other".into();
        case.object.metadata.generation = Some(3);
        case.settle();
        case.sees(ends);
        case.settle();
        assert_eq!((&case.status().finished_jobs, &case.status().failed_jobs), (&vec!["r1".to_owned()], &failed));
        assert!(!case.steps().iter().any(|step| step.starts_with("Run backup")), "{:?}", case.steps());
    }
}

#[test]
fn a_job_that_is_refused_fails_its_step_in_time() {
    let mut case = first_begun();
    case.sees(job("first"));
    case.pass();
    // What else went wrong says nothing of it.
    case.trouble = Some("reading Secret e/s: 500");
    case.after(400);
    case.sees(job("first"));
    case.settle();
    assert_eq!(
        (case.phase().as_str(), case.steps()[0].as_str()),
        (phase::PREREQUISITES, "Run first (1 of 2) Running 1")
    );
    case.after(-400);
    case.trouble = Some("applying Job n/first: exceeded quota");
    case.sees(job("first"));
    case.settle();
    let says = |case: &Case| case.status().steps.iter().find_map(|step| step.message.clone());
    assert_eq!((case.phase().as_str(), says(&case).as_deref()), (phase::PREREQUISITES, case.trouble));
    case.after(301);
    case.settle();
    assert_eq!((case.phase().as_str(), case.reason().as_str()), (phase::FAILED, "HookFailed"));
    assert_eq!(case.status().message.as_deref(), case.trouble);
}

#[test]
fn what_failed_for_an_object_that_was_there_before_is_another_attempt() {
    let mut case = first_begun();
    case.sees(HookState::Earlier);
    case.pass();
    assert_eq!(
        (case.steps()[0].as_str(), case.phase().as_str()),
        ("Run first (1 of 2) Running 2", phase::PREREQUISITES)
    );
    case.sees(job("again"));
    assert_eq!(started(&case.pass().after), ["again"]);
}

#[test]
fn actions_of_every_mode_come_before_a_teardown_and_requested_runs_where_they_say() {
    let mode = |mode: &str| {
        format!(
            "- {{name: part-{mode}, hook: before_delete, mode: {mode}, steps: [{{run_job: {{component: database, command: [a]}}}}]}}
- {{name: run, hook: job, mode: {mode}, steps: [{{run_job: {{component: database, command: [b]}}}}]}}
"
        )
    };
    let actions = ["post", "core", "pre"].map(mode).concat();
    let asked = json!([{ "id": "r1", "action": "run" }]);
    let mut case = Case::with_actions(&actions);
    case.object.spec = spec("one", asked);
    case.settle();
    let all: Vec<&str> = case.status().steps.iter().map(|step| step.name.as_str()).collect();
    let expected = [
        "Create network policies and secrets",
        "Run run",
        "Install or upgrade the HelmRelease",
        "Run run",
        "Create services and middlewares",
        "Run run",
        "Wait for the deployment to be ready",
    ];
    assert_eq!(all, expected);
    let mut case = Case::with_actions(&actions).ready().going();
    case.applied = Some(case.object.spec.clone());
    case.confirmed = Some("the deletion was requested");
    case.leftovers = vec![leftover("Namespace", false)];
    case.settle();
    let order = ["Run part-pre Pending 1", "Run part-core Pending 1", "Run part-post Pending 1"];
    assert_eq!(case.steps(), order);
}
