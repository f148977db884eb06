//! Decisions that no trace of Flux shows: beginnings, waiting, drift, and every way to go or to stay.

mod case;

use case::{Case, NOW, leftover, spec};
use serde_json::json;
use std::time::Duration;
use styrmin_agent::operator::FINALIZER;
use styrmin_agent::operator::decide::{Action, Leftover, Network, phase};
use styrmin_agent::operator::release::FailureEvent;
use styrmin_renderer::spec::Condition;

#[test]
fn the_first_spec_is_noted_with_the_status_that_comes_before_what_is_written() {
    let mut case = Case::new();
    case.differing = vec![case.wanted.prerequisites[0].clone(), case.wanted.release.clone()];
    let begun = case.pass();
    assert_eq!(begun.before, [Action::AddFinalizer]);
    assert_eq!(begun.status.instance_id.as_deref(), Some("one"));
    assert_eq!(begun.status.spec_digest, Some(case.object.spec.digest()));
    assert_eq!(begun.status.phase.as_deref(), Some(phase::RELEASE));
    assert_eq!(begun.status.rollout_started_at.as_deref(), Some(NOW));
    assert_eq!(begun.after, case.differing.iter().cloned().map(Action::Apply).collect::<Vec<_>>());
    assert_eq!(begun.notes[0].reason, "RolloutStarted");
    // Cut off before anything of it was written: the next pass does it, and the start stays.
    let again = case.pass();
    assert_eq!(again.after, begun.after);
    assert_eq!(again.status.rollout_started_at.as_deref(), Some(NOW));
}

#[test]
fn a_later_spec_is_noted_before_anything_is_written() {
    let mut case = Case::new().ready();
    case.change("two");
    case.differing = vec![case.wanted.release.clone()];
    let begun = case.pass();
    assert_eq!((begun.before.as_slice(), begun.after.as_slice()), (&[][..], &[][..]));
    assert_eq!(begun.status.instance_id.as_deref(), Some("two"));
    assert_eq!(begun.status.rollout_started_at, None);
    let written = case.pass();
    assert_eq!(written.status.phase.as_deref(), Some(phase::RELEASE));
    assert_eq!(written.status.rollout_started_at.as_deref(), Some(NOW));
    assert_eq!(written.after, [Action::Apply(case.wanted.release.clone())]);
}

#[test]
fn what_is_missing_is_waited_for_by_name() {
    let mut case = Case::new();
    case.driver_here = false;
    let waits = case.pass();
    assert_eq!((waits.status.instance_id.as_deref(), case.reason().as_str()), (Some("one"), "DriverMissing"));
    assert_eq!(waits.status.spec_digest, None, "nothing was acted on");
    case.after(1);
    assert_eq!(case.pass().status, waits.status, "and written once, however long it takes");
    case.driver_here = true;
    case.missing = Some("Waiting for key password of Secret e/s".into());
    case.pass();
    let waits = case.pass();
    assert_eq!((waits.status.message.as_deref(), case.reason().as_str()), (case.missing.as_deref(), "SecretsMissing"));
    assert_eq!(waits.after, []);
    case.missing = None;
    assert_eq!(case.pass().status.phase.as_deref(), Some(phase::RELEASE));
}

#[test]
fn what_runs_stays_what_it_is_while_something_is_missing() {
    let mut case = Case::new().ready();
    let before = case.object.status.clone().unwrap();
    case.missing = Some("Waiting for key password of Secret e/s".into());
    for _ in 0..2 {
        let waits = case.pass().status;
        assert_eq!(
            (&waits.phase, &waits.display_state, &waits.conditions),
            (&before.phase, &before.display_state, &before.conditions)
        );
        assert_eq!(waits.message, case.missing);
    }
    let waits = case.pass();
    assert_eq!(Some(&waits.status), case.object.status.as_ref(), "written once");
}

#[test]
fn a_copy_does_nothing_and_its_end_touches_nothing() {
    let mut case = Case::new();
    case.copy = Some("it is a copy".into());
    let refused = case.pass();
    assert_eq!((refused.before, refused.after), (vec![], vec![]));
    assert_eq!((case.phase().as_str(), case.reason().as_str()), (phase::FAILED, "Copy"));
    let mut case = Case { copy: case.copy, ..Case::new().ready().going() };
    case.confirmed = Some("confirmed");
    case.leftovers = vec![leftover("Namespace", false)];
    assert_eq!(case.pass().after, [Action::RemoveFinalizer]);
}

#[test]
fn the_end_of_a_pass_that_began_before_the_change_does_not_count() {
    let mut case = Case::new().ready();
    case.object.spec = spec("two", json!([]));
    case.object.metadata.generation = Some(2);
    // Stamped with the new generation, which was never attempted.
    case.release = Some(
        json!({ "metadata": { "generation": 2 }, "status": { "observedGeneration": 1, "lastAttemptedGeneration": 1,
        "conditions": [{ "type": "Ready", "status": "True", "reason": "InstallSucceeded", "message": "m", "observedGeneration": 2 }] } }),
    );
    for _ in 0..4 {
        case.pass();
        assert_ne!(case.phase(), phase::READY);
    }
    let conditions = case.object.status.unwrap().conditions;
    assert_eq!(conditions.iter().find(|one| one.r#type == "HelmReleaseReady").unwrap().status, "Unknown");
}

#[test]
fn a_release_that_is_not_yet_as_wanted_says_nothing() {
    let mut case = Case::new().ready();
    case.object.spec = spec("two", json!([]));
    case.object.metadata.generation = Some(2);
    case.differing = vec![case.wanted.release.clone()];
    // The watch still shows the old one, which is ready.
    for _ in 0..4 {
        case.pass();
        assert_ne!(case.phase(), phase::READY);
    }
    case.differing.clear();
    case.pass();
    assert_eq!(case.phase(), phase::READY);
}

#[test]
fn what_was_applied_is_recorded_before_the_phase_says_ready() {
    let mut case = Case::new();
    case.object.metadata.finalizers = Some(vec![FINALIZER.into()]);
    case.pass();
    case.pass();
    case.release = Case::new().ready().release;
    let ready = case.pass();
    assert_eq!(ready.before, [Action::RecordApplied]);
    assert_eq!(ready.status.phase.as_deref(), Some(phase::READY));
    let again = case.pass();
    assert_eq!((again.before, again.after, again.notes.len()), (vec![], vec![], 0), "nothing is written twice");
    assert_eq!(Some(again.status), case.object.status);
}

#[test]
fn drift_is_put_back_and_counted_once() {
    let mut case = Case::new().ready();
    case.differing = vec![case.wanted.prerequisites[0].clone()];
    let corrected = case.pass();
    assert_eq!(corrected.after, [Action::Apply(case.differing[0].clone())]);
    assert_eq!(corrected.status.drift_corrections, Some(1));
    assert_eq!(
        (corrected.notes[0].reason.as_str(), corrected.notes[0].message.as_str()),
        ("DriftCorrected", "Put back Namespace n")
    );
    assert_eq!(case.phase(), phase::READY);
    // The watch does not show it yet, or it is on its way out: that is no other drift.
    assert_eq!(case.pass().status.drift_corrections, Some(1));
    // Nor is a part of what was noted.
    case.differing.push(json!({ "kind": "Service", "metadata": { "name": "s" } }));
    assert_eq!(case.pass().status.drift_corrections, Some(2));
    case.differing.remove(0);
    assert_eq!(case.pass().status.drift_corrections, Some(2));
    case.differing = vec![case.wanted.prerequisites[0].clone()];
    case.differing.clear();
    case.on_their_way = vec!["Namespace n".into()];
    let waits = case.pass();
    assert_eq!((waits.after.len(), waits.status.drift_corrections, waits.again.is_some()), (0, Some(2), true));
    case.on_their_way.clear();
    case.pass();
    case.differing = vec![case.wanted.prerequisites[0].clone()];
    assert_eq!(case.pass().status.drift_corrections, Some(3), "another time");
}

#[test]
fn without_a_reason_the_application_stays() {
    let mut case = Case::new().ready().going();
    case.leftovers = vec![leftover("HelmRelease", false), leftover("Namespace", false)];
    for pass in 0..3 {
        let stays = case.pass();
        assert_eq!((stays.before, stays.after), (vec![], vec![]), "pass {pass}");
        assert_eq!((case.phase().as_str(), case.reason().as_str()), (phase::DELETING, "NotConfirmed"));
        assert_eq!(stays.status.display_state.as_deref(), Some("Running"), "a warning beside the state");
        assert_eq!(stays.notes.len(), usize::from(pass == 0), "said once");
    }
}

#[test]
fn a_file_that_is_back_lets_the_object_go_and_touches_nothing() {
    let mut case = Case::new().ready().going();
    case.leftovers = vec![leftover("HelmRelease", false)];
    case.pass();
    case.restored = true;
    assert_eq!(case.pass().after, [Action::RemoveFinalizer, Action::ReapplyFolder]);
}

#[test]
fn a_teardown_removes_one_after_the_other_and_the_object_last() {
    let mut case = Case::new().ready().going();
    case.confirmed = Some("the deletion was requested");
    case.leftovers = vec![leftover("HelmRelease", false), leftover("Namespace", false)];
    let begun = case.pass();
    assert_eq!(
        (begun.after.len(), begun.notes[0].reason.as_str()),
        (0, "TeardownStarted"),
        "noted before anything goes"
    );
    let delete = |one: &Leftover| Action::Delete(one.object.clone());
    assert_eq!(case.pass().after, [delete(&case.leftovers[0])]);
    // It is going: nothing is asked twice, and nothing behind it is touched.
    case.leftovers[0].going = true;
    let waits = case.pass();
    assert_eq!((waits.after.len(), waits.status.message.as_deref()), (0, Some("Waiting for HelmRelease n to go")));
    // Once begun it goes on, whatever is said or put back meanwhile.
    (case.confirmed, case.restored) = (None, true);
    case.leftovers.remove(0);
    assert_eq!(case.pass().after, [delete(&case.leftovers[0])]);
    case.leftovers.clear();
    let done = case.pass();
    let back = vec![Action::RemoveFinalizer, Action::ReapplyFolder];
    assert_eq!(
        (done.after, case.phase().as_str()),
        (back, phase::DELETED),
        "the file is there again: so will be the object"
    );
}

#[test]
fn a_lifecycle_of_deleting_needs_a_reason_too_and_keeps_the_object() {
    let mut case = Case::new().ready();
    case.object.spec.lifecycle = styrmin_renderer::spec::Lifecycle::Deleting;
    case.leftovers = vec![leftover("HelmRelease", false)];
    assert_eq!((case.pass().after.len(), case.reason().as_str()), (0, "NotConfirmed"));
    case.confirmed = Some("confirmed");
    case.pass();
    assert_eq!(case.pass().after.len(), 1);
    case.leftovers.clear();
    let done = case.pass();
    assert_eq!((done.after, case.phase().as_str()), (vec![], phase::DELETED));
}

#[test]
fn an_object_that_somebody_else_holds_is_left_alone() {
    let mut case = Case::new().ready().going();
    case.object.metadata.finalizers = Some(vec!["example.com/other".into()]);
    case.confirmed = Some("the deletion was requested");
    case.leftovers = vec![leftover("HelmRelease", false)];
    let before = case.object.status.clone();
    let left = case.pass();
    assert_eq!((left.before.len(), left.after.len()), (0, 0));
    assert_eq!(left.status.phase, before.unwrap().phase);
}

#[test]
fn what_the_api_server_refuses_is_said_until_it_does_not() {
    let mut case = Case::new();
    case.settle();
    case.trouble = Some("applying HelmRelease e/s: exceeded quota");
    let said = case.settle().status;
    assert_eq!((said.message.as_deref(), said.phase.as_deref()), (case.trouble, Some(phase::RELEASE)));
    case.after(1);
    assert_eq!(case.pass().status, said, "written once");
    case.trouble = None;
    assert_eq!(case.pass().status.message, None);
}

#[test]
fn a_record_that_somebody_deleted_is_made_again() {
    let mut case = Case::new().ready();
    case.recorded = false;
    let again = case.pass();
    assert_eq!(again.before, [Action::RecordApplied]);
    assert_eq!((case.phase().as_str(), case.status().drift_corrections), (phase::READY, Some(1)));
    assert_eq!(again.notes[0].message, "Put back ControllerRevision of what was applied");
    case.recorded = true;
    assert_eq!(case.pass().before, []);
}

fn stalled() -> serde_json::Value {
    json!({ "metadata": { "generation": 1 }, "status": { "observedGeneration": 1, "lastAttemptedGeneration": 1, "failures": 4,
        "installFailures": 4, "conditions": [
            { "type": "Ready", "status": "False", "reason": "RetriesExceeded", "message": "m", "observedGeneration": 1 },
            { "type": "Stalled", "status": "True", "reason": "RetriesExceeded", "message": "gave up", "observedGeneration": 1 }] } })
}

#[test]
fn what_flux_has_given_up_on_is_tried_again_when_somebody_asks() {
    let mut case = Case::new();
    case.object.metadata.finalizers = Some(vec![FINALIZER.into()]);
    case.settle();
    case.release = Some(stalled());
    case.settle();
    assert_eq!((case.phase().as_str(), case.reason().as_str()), (phase::FAILED, "RetriesExceeded"));
    assert_eq!(case.status().release_reset_at, None, "nobody has asked");
    // The same once more.
    case.object.spec.instance_id = "two".into();
    case.after(60);
    case.settle();
    let asked = case.status().release_reset_at.clone().unwrap();
    assert_eq!((case.phase().as_str(), asked.as_str()), (phase::RELEASE, "2026-11-29T15:01:00Z"));
    case.after(5);
    case.settle();
    assert_eq!(case.phase(), phase::RELEASE, "what Flux said before it was asked says nothing");
    // Flux has heard it and gives up again, then somebody else asks and it is ready.
    let mut again = stalled();
    again["status"]["lastHandledResetAt"] = asked.as_str().into();
    case.release = Some(again);
    case.settle();
    assert_eq!(case.phase(), phase::FAILED);
    case.flux_ready();
    case.release.as_mut().unwrap()["status"]["lastHandledResetAt"] = "2026-11-29T16:02:00.5+01:00".into();
    case.settle();
    assert_eq!((case.phase().as_str(), &case.status().release_reset_at), (phase::READY, &None));
}

#[test]
fn another_release_is_not_asked_to_be_tried_again() {
    let mut case = Case::new();
    case.release = Some(stalled());
    case.settle();
    case.change("two");
    case.differing = vec![case.wanted.release.clone()];
    case.settle();
    assert_eq!((case.phase().as_str(), &case.status().release_reset_at), (phase::RELEASE, &None));
}

#[test]
fn the_way_back_to_what_was_applied_is_a_rollout_without_actions() {
    let mut case = Case::with_actions(
        "[{name: a, hook: upgrade, mode: pre, steps: [{run_job: {component: database, command: [a]}}]}]",
    )
    .ready();
    let applied = case.object.spec.clone();
    case.change("two");
    case.differing = vec![case.wanted.release.clone()];
    case.settle();
    assert_eq!(case.phase(), phase::RELEASE);
    case.object.spec = applied;
    let noted = case.pass();
    assert_eq!(noted.notes[0].message, "Instance one: back to what was applied");
    let written = case.pass();
    assert_eq!(written.after, [Action::Apply(case.wanted.release.clone())]);
    assert_eq!((case.phase().as_str(), case.steps().len(), case.status().steps.len()), (phase::RELEASE, 0, 4));
    assert!(case.status().rollout_started_at.is_some());
    case.after(271);
    let late = case.pass();
    assert_eq!((late.status.display_state.as_deref(), late.notes[0].reason.as_str()), (Some("Error"), "ReadyTimeout"));
    assert_eq!(case.pass().notes, [], "said once");
    case.differing.clear();
    case.flux_ready();
    // The Services of the other one may be others.
    case.network = None;
    case.pass();
    assert_eq!(case.phase(), phase::SERVICES);
    case.network = Some(styrmin_agent::operator::decide::Network::default());
    case.settle();
    assert_eq!((case.phase().as_str(), case.status().display_state.as_deref()), (phase::READY, Some("Running")));
}

#[test]
fn a_change_of_ours_is_no_drift() {
    let mut case = Case::new();
    case.wanted.release["spec"] = json!({ "timeout": "300s", "valuesFrom": [{ "name": "one" }] });
    let mut case = case.ready();
    // Another setting of the agent.
    case.wanted.release["spec"]["timeout"] = "600s".into();
    case.differing = vec![case.wanted.release.clone()];
    let applied = case.pass();
    assert_eq!(applied.after, [Action::Apply(case.wanted.release.clone())]);
    assert_eq!((case.phase().as_str(), case.status().drift_corrections), (phase::READY, None));
    case.differing.clear();
    case.pass();
    // Now an edit.
    case.differing = vec![case.wanted.release.clone()];
    case.pass();
    assert_eq!((case.phase().as_str(), case.status().drift_corrections), (phase::READY, Some(1)));
    case.differing.clear();
    case.pass();
    // Another value in a Secret that somebody else keeps.
    case.wanted.release["spec"]["valuesFrom"][0]["name"] = "two".into();
    case.differing = vec![case.wanted.release.clone()];
    let renewed = case.pass();
    assert_eq!(renewed.notes[0].reason, "Renewed");
    assert_eq!((case.phase().as_str(), case.status().drift_corrections), (phase::RELEASE, Some(1)));
    assert_eq!(case.status().rollout_started_at.as_deref(), Some(NOW));
    case.after(271);
    case.pass();
    assert_eq!(case.reason(), "ReadyTimeout");
    case.differing.clear();
    case.settle();
    assert_eq!((case.phase().as_str(), case.reason().as_str()), (phase::READY, "Ready"));
    assert_eq!(case.pass().notes, []);
}

#[test]
fn what_is_waited_for_too_long_is_an_error_that_names_it() {
    let mut case = Case::new();
    case.driver_here = false;
    case.pass();
    case.after(269);
    case.pass();
    assert_eq!(case.status().display_state.as_deref(), Some("Deploying"));
    case.after(2);
    let late = case.pass();
    assert_eq!((case.reason().as_str(), late.status.display_state.as_deref()), ("ReadyTimeout", Some("Error")));
    let message = late.status.message.clone().unwrap();
    let begins = "Deployment did not reach Ready within 270 seconds, phase CreatingPrerequisites: Waiting for";
    assert!(message.starts_with(begins), "{message}");
    assert_eq!(late.notes[0].reason, "ReadyTimeout");
    case.after(60);
    assert_eq!(case.pass().status, late.status, "written once");
    // It comes all the same.
    case.driver_here = true;
    case.settle();
    assert_eq!((case.phase().as_str(), case.status().display_state.as_deref()), (phase::RELEASE, Some("Deploying")));
    case.flux_ready();
    case.settle();
    assert_eq!(case.phase(), phase::READY);
}

#[test]
fn a_release_that_could_not_be_written_gets_a_new_start() {
    let mut case = Case::new();
    case.differing = vec![case.wanted.release.clone()];
    case.settle();
    case.trouble = Some("applying NetworkPolicy n/p: exceeded quota");
    case.after(30);
    let refused = case.pass().status;
    assert_eq!((refused.message.as_deref(), refused.rollout_started_at.as_deref()), (case.trouble, None));
    case.after(30);
    assert_eq!(case.pass().status, refused, "written once: each write is a reason for another pass");
    case.after(211);
    let late = case.pass().status;
    let message = late.message.clone().unwrap();
    assert!(message.ends_with("phase CreatingHelmRelease: applying NetworkPolicy n/p: exceeded quota"), "{message}");
    case.after(30);
    assert_eq!(case.pass().status, late);
    // Now it is written.
    (case.trouble, case.differing) = (None, Vec::new());
    case.pass();
    assert_eq!(case.status().rollout_started_at.as_deref(), Some("2026-11-29T15:05:01Z"));
    assert_eq!((case.reason().as_str(), case.status().display_state.as_deref()), ("Progressing", Some("Deploying")));
}

#[test]
fn what_an_earlier_rollout_took_makes_no_newer_one_late() {
    let upgraded = || {
        let mut case = Case::new().ready();
        case.after(3600);
        case.change("two");
        case
    };
    let mut case = upgraded();
    case.driver_here = false;
    let remediated = Condition { r#type: "HelmReleaseRemediated".into(), ..case.condition("Ready").unwrap().clone() };
    case.object.status.as_mut().unwrap().conditions.push(remediated);
    case.pass();
    case.pass();
    assert_eq!((case.reason().as_str(), case.status().display_state.as_deref()), ("DriverMissing", Some("Deploying")));
    // Nor does what Flux said of it count for the newer one.
    let release = case.condition("HelmReleaseReady").unwrap();
    assert_eq!((release.status.as_str(), release.reason.as_str()), ("Unknown", "Progressing"));
    assert_eq!(case.condition("HelmReleaseRemediated"), None);
    case.after(271);
    case.pass();
    assert_eq!(case.reason(), "ReadyTimeout");
    let mut case = upgraded();
    case.object.status = case.told("reading Secret e/s: 500").map(|(status, _)| status);
    assert_eq!((case.reason().as_str(), case.status().display_state.as_deref()), ("Progressing", Some("Deploying")));
    // Of one that has failed a new change is none that fails.
    let mut case = upgraded();
    case.object.status.as_mut().unwrap().phase = Some(phase::FAILED.into());
    case.object.status = case.told("reading Secret e/s: 500").map(|(status, _)| status);
    assert_eq!((case.phase().as_str(), case.status().instance_id.as_deref()), (phase::PREREQUISITES, Some("two")));
}

#[test]
fn what_cannot_be_observed_undoes_no_end_that_has_begun() {
    let mut case = Case::new().ready().going();
    case.confirmed = Some("the deletion was requested");
    case.leftovers = vec![leftover("Namespace", false)];
    case.settle();
    case.object.spec.instance_id = "never noted".into();
    case.after(3600);
    assert_eq!(case.told("why"), None);
}

#[test]
fn a_release_that_has_recovered_is_not_asked_to_be_tried_again() {
    let mut case = Case::new().ready();
    let release = case.release.as_mut().unwrap();
    release["status"]["failures"] = 1.into();
    release["status"]["upgradeFailures"] = 1.into();
    // Nothing of the release changes.
    case.change("two");
    case.settle();
    assert_eq!((case.phase().as_str(), &case.status().release_reset_at), (phase::READY, &None));
    // One that was never ready for us is, though Flux calls it so.
    case.wanted.release["spec"] = json!({ "postRenderers": [] });
    case.change("three");
    case.pass();
    case.pass();
    assert!(case.status().release_reset_at.is_some());
}

#[test]
fn of_what_cannot_be_observed_the_instance_and_the_reason_are_told() {
    let mut case = Case::new();
    let why = "reading Secret e/s: forbidden";
    let (status, notes) = case.told(why).unwrap();
    assert_eq!((status.instance_id.as_deref(), status.phase.as_deref()), (Some("one"), Some(phase::PREREQUISITES)));
    assert_eq!((status.message.as_deref(), notes), (Some(why), vec![]));
    case.object.status = Some(status);
    assert_eq!(case.told(why), None, "once");
    case.settle();
    case.after(271);
    let (late, notes) = case.told(why).unwrap();
    // With the event that a failure has.
    assert_eq!(notes.iter().map(|note| note.reason.as_str()).collect::<Vec<_>>(), ["ReadyTimeout"]);
    assert_eq!(late.display_state.as_deref(), Some("Error"));
    assert!(late.message.unwrap().ends_with("phase CreatingHelmRelease: reading Secret e/s: forbidden"));
    // What runs goes on running.
    let case = Case::new().ready();
    assert_eq!(case.told("why"), None);
}

#[test]
fn while_nobody_confirms_an_end_what_runs_is_kept_as_it_is() {
    let mut case = Case::new().ready().going();
    case.differing = vec![case.wanted.prerequisites[0].clone()];
    let kept = case.pass();
    assert_eq!(kept.after, [Action::Apply(case.differing[0].clone())]);
    let said: Vec<&str> = kept.notes.iter().map(|note| note.reason.as_str()).collect();
    assert_eq!((said, case.status().drift_corrections), (vec!["DriftCorrected", "NotConfirmed"], Some(1)));
    case.differing.clear();
    // An action had stopped something.
    case.object.status.as_mut().unwrap().stopped_components = vec!["database".into()];
    let starts = case.pass();
    assert_eq!((starts.status.stopped_components, starts.again), (vec![], Some(Duration::ZERO)));
    // What was never acted on is not begun now.
    case.change("two");
    case.differing = vec![case.wanted.release.clone()];
    assert_eq!(case.pass().after, []);
}

#[test]
fn every_phase_and_every_failure_has_an_event() {
    let mut case = Case::new();
    case.collisions = vec!["the service \"a\" of others has no alias".into()];
    let reasons = |notes: &[styrmin_agent::operator::decide::Note]| -> Vec<String> {
        notes.iter().map(|note| note.reason.clone()).collect()
    };
    let first = case.pass();
    assert_eq!(reasons(&first.notes), ["RolloutStarted", "AliasCollision"]);
    case.flux_ready();
    case.network = None;
    // Something else is told as well: the phase is not left out for it.
    case.collisions = vec!["another".into()];
    let services = case.pass();
    assert_eq!(
        (reasons(&services.notes), case.phase().as_str()),
        (vec!["AliasCollision".into(), "PhaseChanged".into()], phase::SERVICES)
    );
    case.network = Some(styrmin_agent::operator::decide::Network::default());
    assert_eq!(reasons(&case.pass().notes), ["Ready"]);
    case.release = Some(stalled());
    let failed = case.pass();
    assert_eq!((reasons(&failed.notes), failed.notes[0].warning), (vec!["RolloutFailed".into()], true));
}

#[test]
fn a_suspended_release_is_named_as_what_is_waited_for() {
    let mut case = Case::new();
    case.release =
        Some(json!({ "metadata": { "generation": 1, "name": "s", "namespace": "e" }, "spec": { "suspend": true } }));
    case.settle();
    let message = case.status().message.clone().unwrap();
    assert!(message.starts_with("HelmRelease e/s is suspended") && message.contains("flux resume"), "{message}");
    assert_eq!(case.pass().status, *case.status(), "written once");
}

#[test]
fn drift_of_what_has_failed_is_counted_too() {
    let mut case = Case::new().ready();
    case.release = Some(stalled());
    case.settle();
    assert_eq!(case.phase(), phase::FAILED);
    let differing = vec![case.wanted.prerequisites[0].clone()];
    case.differing.clone_from(&differing);
    // What the rollout itself wrote a moment ago may not be seen yet.
    assert_eq!((case.pass().after.len(), case.status().drift_corrections), (1, None));
    case.after(11);
    let corrected = case.pass();
    assert_eq!((corrected.notes[0].reason.as_str(), case.status().drift_corrections), ("DriftCorrected", Some(1)));
    assert_eq!((corrected.after, case.phase().as_str()), (vec![Action::Apply(differing[0].clone())], phase::FAILED));
}

#[test]
fn what_runs_is_kept_as_it_is_while_something_is_missing() {
    let mut case = Case::new().ready();
    case.missing = Some("Waiting for key password of Secret e/s".into());
    case.differing = vec![case.wanted.prerequisites[0].clone()];
    case.unwanted = vec![leftover("Service", false).object];
    let kept = case.pass();
    let both = vec![Action::Apply(case.differing[0].clone()), Action::Delete(case.unwanted[0].clone())];
    assert_eq!((kept.after, kept.notes[0].message.as_str()), (both, "Put back Namespace n"));
    assert_eq!((case.phase().as_str(), case.status().drift_corrections), (phase::READY, Some(1)));
    // In the middle of a rollout as well, but that is no drift.
    case.object.status.as_mut().unwrap().phase = Some(phase::RELEASE.into());
    assert_eq!((case.pass().after.len(), case.status().drift_corrections), (2, Some(1)));
    // A change waits, and writes nothing until what it is rendered from is there.
    case.change("two");
    case.pass();
    assert_eq!(case.pass().after, []);
}

#[test]
fn a_change_of_nothing_waits_for_what_is_missing_no_longer_than_others() {
    let mut case = Case::new().ready();
    case.applied = Some(case.object.spec.clone());
    case.object.spec.instance_id = "two".into();
    case.object.metadata.generation = Some(2);
    case.missing = Some("Waiting for key password of Secret e/s".into());
    case.settle();
    assert_eq!((case.status().steps.len(), case.phase().as_str()), (1, phase::PREREQUISITES));
    case.after(271);
    case.settle();
    assert_eq!(case.reason(), "ReadyTimeout");
    assert!(case.status().message.as_ref().unwrap().ends_with("Waiting for key password of Secret e/s"));
    // Then it is a rollout as every other one: Flux is asked again where it has given up.
    case.missing = None;
    case.release = Some(stalled());
    case.pass();
    case.pass();
    assert!(case.status().release_reset_at.is_some());
    case.flux_ready();
    case.release.as_mut().unwrap()["status"]["lastHandledResetAt"] = case.status().release_reset_at.clone().into();
    case.settle();
    assert_eq!(case.phase(), phase::READY);
}

#[test]
fn services_that_cannot_be_made_are_named_when_it_takes_too_long() {
    let mut case = Case::new();
    case.flux_ready();
    case.network = None;
    case.settle();
    case.network = Some(Network::default());
    case.differing = vec![json!({ "kind": "Service", "metadata": { "name": "web" } })];
    case.trouble = Some("applying Service n/web: exceeded quota");
    case.settle();
    case.after(271);
    case.settle();
    let message = case.status().message.clone().unwrap();
    assert!(message.ends_with("phase CreatingServices: applying Service n/web: exceeded quota"), "{message}");
}

#[test]
fn a_suspended_release_is_uninstalled_all_the_same() {
    let mut case = Case::new().ready().going();
    case.confirmed = Some("the deletion was requested");
    case.release.as_mut().unwrap()["spec"]["suspend"] = true.into();
    case.leftovers = vec![leftover("HelmRelease", false), leftover("Namespace", false)];
    case.pass();
    let release = case.leftovers[0].object.clone();
    assert_eq!(case.pass().after, [Action::Resume(release.clone())]);
    case.release.as_mut().unwrap()["spec"]["suspend"] = false.into();
    assert_eq!(case.pass().after, [Action::Delete(release)]);
}

#[test]
fn a_change_that_flux_never_applied_stays_failed_when_its_event_is_forgotten() {
    let mut case = Case::new().ready();
    let release = case.release.as_mut().unwrap();
    release["status"]["failures"] = 1.into();
    release["status"]["history"] =
        json!([{ "version": 1, "status": "deployed", "lastDeployed": "2026-11-29T14:00:00Z" }]);
    case.failure = Some(FailureEvent {
        reason: "UpgradeFailed".into(),
        message: "no such path".into(),
        at: "2026-11-29T15:00:00Z".parse().unwrap(),
    });
    case.settle();
    let failed = case.status().clone();
    assert_eq!((case.phase().as_str(), case.reason().as_str()), (phase::FAILED, "UpgradeFailed"));
    // After an hour.
    case.failure = None;
    case.after(4000);
    case.settle();
    assert_eq!(*case.status(), failed);
    // Flux has brought it after all.
    case.release.as_mut().unwrap()["status"]["history"] =
        json!([{ "version": 2, "status": "deployed", "lastDeployed": "2026-11-29T15:30:00Z" }]);
    case.settle();
    assert_eq!(case.phase(), phase::READY);
}

#[test]
fn a_condition_without_a_generation_is_of_the_last_attempt() {
    for (attempted, reached) in [(1, phase::READY), (0, phase::RELEASE)] {
        let mut case = Case::new();
        case.flux_ready();
        let status = &mut case.release.as_mut().unwrap()["status"];
        status["lastAttemptedGeneration"] = attempted.into();
        status["conditions"][0].as_object_mut().unwrap().remove("observedGeneration");
        case.settle();
        assert_eq!(case.phase(), reached);
    }
}

#[test]
fn what_is_refused_in_a_teardown_is_shown() {
    let mut case = Case::new().ready().going();
    case.confirmed = Some("the deletion was requested");
    case.leftovers = vec![leftover("HelmRelease", false)];
    case.pass();
    case.pass();
    case.trouble = Some("deleting HelmRelease e/n: forbidden");
    case.settle();
    let says = |case: &Case| (case.status().message.clone().unwrap(), case.status().display_state.clone().unwrap());
    let message = "Waiting for HelmRelease n to go: deleting HelmRelease e/n: forbidden".to_owned();
    assert_eq!(says(&case), (message, "Error".to_owned()));
    case.trouble = None;
    case.settle();
    assert_eq!(says(&case), ("Waiting for HelmRelease n to go".to_owned(), "Deleting".to_owned()));
    // While nobody confirms it nothing has failed.
    let mut case = Case::new().ready().going();
    case.trouble = Some("applying NetworkPolicy n/p: forbidden");
    case.settle();
    let (message, display) = says(&case);
    assert!(message.ends_with("put back; applying NetworkPolicy n/p: forbidden"), "{message}");
    assert_eq!(display, "Running");
    case.trouble = None;
    case.settle();
    assert!(says(&case).0.ends_with("put back"));
}
