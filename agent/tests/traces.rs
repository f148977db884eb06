//! Every recorded trace of helm-controller (`tests/flux-traces`), line by line through the decision.

#![expect(clippy::unwrap_used, reason = "a test")]

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use styrmin_agent::operator::FINALIZER;
use styrmin_agent::operator::decide::{
    Action, Decision, DriverSeen, Leftover, Network, ObjectKey, Observed, Settings, Wanted, decide, phase,
};
use styrmin_agent::operator::release::FailureEvent;
use styrmin_renderer::driver::Driver;
use styrmin_renderer::spec::{Condition, StyrminDeployment, StyrminDeploymentSpec};

/// What the operator says after one line.
#[derive(Debug, Clone)]
struct After {
    /// Generation of the HelmRelease.
    generation: i64,
    line: Value,
    phase: String,
    display: String,
    message: String,
    ready: Condition,
    release: Condition,
    remediated: Option<Condition>,
    corrections: u32,
}

impl After {
    fn condition<'a>(&'a self, kind: &str, status: &str) -> Option<&'a Value> {
        let conditions = self.line["status"]["conditions"].as_array()?;
        conditions.iter().find(|condition| condition["type"] == kind && condition["status"] == status)
    }
}

fn driver() -> Driver {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../drivers/web-application");
    let files = ["driver.styrmin.yml", "values.styrmin.yml"]
        .map(|name| (name.to_owned(), std::fs::read_to_string(folder.join(name)).unwrap()));
    Driver::from_definition(BTreeMap::from(files), "sha256:0123456789abcdef").unwrap()
}

fn object(instance: i64) -> StyrminDeployment {
    let spec: StyrminDeploymentSpec = serde_json::from_value(json!({
        "deploymentId": "k7m2q9xw4t1a", "instanceId": format!("instance-{instance}"), "lifecycle": "running",
        "driver": { "name": "web-application", "version": "1.0.0", "digest": "sha256:0123456789abcdef" },
        "applicationVersion": "1.27", "context": { "number": instance },
    }))
    .unwrap();
    let mut object = StyrminDeployment::new("styrmin-k7m2q9xw4t1a", spec);
    object.metadata.generation = Some(instance);
    object
}

/// The lines of a trace.
fn lines(name: &str) -> Vec<Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../tests/flux-traces/{name}.jsonl"));
    std::fs::read_to_string(path).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Feeds a trace up to its deletion, and gives what the operator says after every line that shows the HelmRelease.
fn replay(name: &str) -> Vec<After> {
    replayed(name).0
}

/// The same with the object at its end.
fn replayed(name: &str) -> (Vec<After>, StyrminDeployment) {
    let driver = driver();
    let settings = Settings { ready_timeout: 270, ..Settings::default() };
    let mut object = object(1);
    let (mut applied, mut failure, mut release) = (None, None, None::<Value>);
    let (mut seen, mut gone) = (Vec::new(), false);
    for line in lines(name) {
        let now: Timestamp = line["at"].as_str().unwrap().parse().unwrap();
        if let Some(event) = line.get("event") {
            failure = FailureEvent::read(event).or(failure);
        } else if let Some(found) = line.get("helmRelease") {
            gone = line["watch"] == "DELETED" || !found["metadata"]["deletionTimestamp"].is_null();
            let generation = found["metadata"]["generation"].as_i64().unwrap();
            if !gone && release.as_ref().is_none_or(|known| known["metadata"]["generation"] != generation) {
                // A change of ours: another instance, whose HelmRelease this is.
                let status = object.status.take();
                object = self::object(generation);
                object.status = status;
            }
            release = Some(found.clone());
        } else {
            continue;
        }
        let Some(found) = release.clone().filter(|_| !gone) else { continue };
        // As often as the operator asks for it.
        for _ in 0..4 {
            let wanted = Wanted { release: json!({ "kind": "HelmRelease" }), ..Wanted::default() };
            let network = Network::default();
            let decision = decide(
                &observed(&object, &driver, &wanted, &found, failure.as_ref(), applied.as_ref(), &network),
                now,
                &settings,
            );
            let unchanged = object.status.as_ref() == Some(&decision.status);
            if decision
                .before
                .iter()
                .any(|action| matches!(action, styrmin_agent::operator::decide::Action::RecordApplied))
            {
                applied = Some(object.spec.clone());
            }
            object.status = Some(decision.status);
            if unchanged {
                break;
            }
        }
        if line.get("helmRelease").is_some() {
            let status = object.status.clone().unwrap();
            let condition = |kind: &str| status.conditions.iter().find(|condition| condition.r#type == kind).cloned();
            seen.push(After {
                generation: found["metadata"]["generation"].as_i64().unwrap(),
                line: found,
                phase: status.phase.clone().unwrap(),
                display: status.display_state.clone().unwrap(),
                message: status.message.clone().unwrap_or_default(),
                ready: condition("Ready").unwrap(),
                release: condition("HelmReleaseReady").unwrap(),
                remediated: condition("HelmReleaseRemediated"),
                corrections: status.drift_corrections.unwrap_or_default(),
            });
        }
    }
    assert!(!seen.is_empty());
    (seen, object)
}

fn observed<'a>(
    object: &'a StyrminDeployment,
    driver: &'a Driver,
    wanted: &'a Wanted,
    release: &'a Value,
    failure: Option<&'a FailureEvent>,
    applied: Option<&'a StyrminDeploymentSpec>,
    network: &'a Network,
) -> Observed<'a> {
    Observed {
        release: Some(release),
        failure,
        applied,
        network: Some(network),
        ..Observed::new(object, DriverSeen::Here(driver), Ok(wanted))
    }
}

fn never(seen: &[After], phase: &str, generation: Option<i64>) {
    for (number, after) in seen.iter().enumerate() {
        let counts = generation.is_none_or(|generation| generation == after.generation);
        assert!(!(counts && after.phase == phase), "line {number}: {phase}: {after:#?}");
    }
}

fn last(seen: &[After]) -> &After {
    seen.last().unwrap()
}

fn last_of(seen: &[After], generation: i64) -> &After {
    seen.iter().rev().find(|after| after.generation == generation).unwrap()
}

fn first(seen: &[After], what: impl Fn(&After) -> bool) -> (usize, &After) {
    seen.iter().enumerate().find(|(_, after)| what(after)).unwrap()
}

fn is_ready(after: &After) {
    assert_eq!(
        (after.phase.as_str(), after.display.as_str(), after.ready.status.as_str()),
        (phase::READY, "Running", "True"),
        "{after:#?}"
    );
    assert_eq!((after.release.status.as_str(), after.release.reason.as_str()), ("True", "FluxReady"));
    assert_eq!(after.message, "");
}

/// Failed from the first line with Stalled=True on, and no earlier.
fn failed_when_stalled(seen: &[After], generation: i64) {
    let of = |after: &&After| after.generation == generation;
    let stalled = seen.iter().filter(of).position(|after| after.condition("Stalled", "True").is_some()).unwrap();
    for (number, after) in seen.iter().filter(of).enumerate() {
        assert_eq!(after.phase == phase::FAILED, number >= stalled, "line {number}: {after:#?}");
    }
    let after = seen.iter().filter(of).nth(stalled).unwrap();
    let stalled = after.condition("Stalled", "True").unwrap()["message"].as_str().unwrap();
    let failure = after.condition("Released", "False").unwrap()["message"].as_str().unwrap();
    assert_eq!(after.message, format!("{stalled}: {failure}"));
    assert_eq!((after.ready.status.as_str(), after.ready.reason.as_str()), ("False", "RetriesExceeded"));
    assert_eq!(after.display, "Error");
}

#[test]
fn a_healthy_life() {
    for name in ["install-upgrade-delete", "shape-life"] {
        let (seen, object) = replayed(name);
        never(&seen, phase::FAILED, None);
        is_ready(last_of(&seen, 1));
        let (_, begun) = first(&seen, |after| after.generation == 2);
        assert_eq!((begun.phase.as_str(), begun.release.status.as_str()), (phase::RELEASE, "Unknown"), "{name}");
        is_ready(last_of(&seen, 2));
        ends(name, object);
    }
}

/// Somebody deletes the object, which the operator holds.
fn delete(object: &mut StyrminDeployment) {
    object.metadata.deletion_timestamp = Some(Time("2026-11-29T16:00:00Z".parse().unwrap()));
    object.metadata.finalizers = Some(vec![FINALIZER.into()]);
}

fn going_release() -> Leftover {
    let object = ObjectKey::new("helm.toolkit.fluxcd.io/v2", "HelmRelease", "e", "n");
    Leftover { name: "HelmRelease e/n".into(), object, going: true }
}

/// The lines from the deletion on: the teardown waits for the uninstall, then ends.
fn ends(name: &str, mut object: StyrminDeployment) {
    let driver = driver();
    let wanted = Wanted::default();
    delete(&mut object);
    let is_going = |line: &Value| !line["helmRelease"]["metadata"]["deletionTimestamp"].is_null();
    let lines: Vec<Value> = lines(name).into_iter().filter(is_going).collect();
    assert!(lines.len() >= 3, "{name}");
    for line in lines {
        let gone = line["watch"] == "DELETED";
        let leftovers = [going_release()];
        let mut last = Decision::default();
        for _ in 0..4 {
            let observed = Observed {
                release: Some(&line["helmRelease"]).filter(|_| !gone),
                confirmed: Some("the deletion was requested"),
                leftovers: if gone { &[] } else { &leftovers },
                ..Observed::new(&object, DriverSeen::Here(&driver), Ok(&wanted))
            };
            last = decide(&observed, line["at"].as_str().unwrap().parse().unwrap(), &Settings::default());
            object.status = Some(last.status.clone());
        }
        let status = object.status.as_ref().unwrap();
        assert_ne!(status.display_state.as_deref(), Some("Error"), "{name}: {status:?}");
        let (phase, after) = if gone {
            (phase::DELETED, vec![Action::RemoveFinalizer])
        } else {
            assert_eq!(status.message.as_deref(), Some("Waiting for HelmRelease e/n to go"), "{name}");
            (phase::DELETING, vec![])
        };
        assert_eq!((status.phase.as_deref(), last.after), (Some(phase), after), "{name}");
    }
}

#[test]
fn an_uninstall_that_fails_is_told() {
    let (_, mut object) = replayed("shape-life");
    delete(&mut object);
    let release = json!({ "status": { "conditions": [{ "type": "Ready", "status": "False", "reason": "UninstallFailed",
        "message": "hook failed" }] } });
    let leftovers = [going_release()];
    let (driver, wanted) = (driver(), Wanted::default());
    let mut now: Timestamp = "2026-11-29T16:00:00Z".parse().unwrap();
    let mut pauses = Vec::new();
    for _ in 0..4 {
        let observed = Observed {
            release: Some(&release),
            confirmed: Some("the deletion was requested"),
            leftovers: &leftovers,
            ..Observed::new(&object, DriverSeen::Here(&driver), Ok(&wanted))
        };
        let decision = decide(&observed, now, &Settings::default());
        pauses.push(decision.again.unwrap().as_secs());
        object.status = Some(decision.status);
        now += jiff::SignedDuration::from_secs(80);
    }
    let status = object.status.unwrap();
    assert_eq!(status.message.as_deref(), Some("Waiting for HelmRelease e/n to go: hook failed"));
    assert_eq!(status.display_state.as_deref(), Some("Error"));
    assert_eq!(pauses, [0, 2, 10, 20], "asked for less and less often");
}

#[test]
fn a_release_that_is_uninstalled_by_others_is_no_failure() {
    let (seen, mut object) = replayed("shape-holder-namespace-deleted");
    never(&seen, phase::FAILED, None);
    is_ready(last(&seen));
    let driver = driver();
    let wanted = Wanted { release: json!({ "kind": "HelmRelease" }), ..Wanted::default() };
    for line in lines("shape-holder-namespace-deleted") {
        let found = &line["helmRelease"];
        if found["metadata"]["deletionTimestamp"].is_null() {
            continue;
        }
        let gone = line["watch"] == "DELETED";
        let (going, differing) = (["HelmRelease n".to_owned()], [wanted.release.clone()]);
        let observed = Observed {
            release: Some(found).filter(|_| !gone),
            going: if gone { &[] } else { &going },
            differing: if gone { &differing } else { &[] },
            applied: Some(&object.spec),
            ..Observed::new(&object, DriverSeen::Here(&driver), Ok(&wanted))
        };
        let decision = decide(&observed, line["at"].as_str().unwrap().parse().unwrap(), &Settings::default());
        let made = decision.after.contains(&Action::Apply(wanted.release.clone()));
        assert_eq!(made, gone, "made again once it is gone: {decision:#?}");
        assert_eq!(decision.status.phase.as_deref(), Some(phase::READY));
        assert_eq!(decision.status.drift_corrections, gone.then_some(1));
        object.status = Some(decision.status);
    }
}

#[test]
fn an_install_that_fails_is_failed_when_flux_gives_up() {
    let seen = replay("install-fails");
    failed_when_stalled(&seen, 1);
    is_ready(last_of(&seen, 2));
    assert!(last_of(&seen, 2).remediated.is_none());
}

#[test]
fn an_upgrade_that_fails_names_the_failure_and_not_the_rollback() {
    for name in ["upgrade-fails", "shape-upgrade-fails"] {
        let seen = replay(name);
        failed_when_stalled(&seen, 2);
        let (_, meanwhile) =
            first(&seen, |after| after.generation == 2 && after.condition("Remediated", "True").is_some());
        assert_eq!(
            (meanwhile.release.status.as_str(), meanwhile.release.reason.as_str()),
            ("False", "UpgradeFailed"),
            "{name}"
        );
        assert_eq!(meanwhile.remediated.as_ref().unwrap().reason, "RollbackSucceeded");
        // What is copied has Flux's own time, and names the failure as Released does.
        let copied = seen.iter().filter(|after| after.generation == 2 && after.release.status == "False");
        let mut checked = 0;
        for after in copied {
            let (Some(ready), Some(released)) =
                (after.condition("Ready", "False"), after.condition("Released", "False"))
            else {
                continue;
            };
            checked += 1;
            assert_eq!(ready["lastTransitionTime"], after.release.last_transition_time.as_str(), "{name}: {after:#?}");
            assert_eq!(released["message"], after.release.message.as_str(), "{name}");
        }
        assert!(checked > 3, "{name}: {checked}");
        is_ready(last_of(&seen, 3));
        assert!(last_of(&seen, 3).remediated.is_none());
    }
}

#[test]
fn a_retry_that_succeeds_is_no_failure() {
    let seen = replay("upgrade-recovers");
    never(&seen, phase::FAILED, None);
    is_ready(last(&seen));
}

#[test]
fn a_rollback_that_flux_calls_ready_is_a_failure() {
    let seen = replay("override-rolled-back");
    never(&seen, phase::READY, Some(2));
    let calls_ready = |after: &After| {
        after.generation == 2
            && after.condition("Ready", "True").is_some_and(|ready| ready["observedGeneration"] == 2)
            && after.condition("Reconciling", "True").is_none()
    };
    let (at, after) = first(&seen, calls_ready);
    assert_eq!((after.phase.as_str(), after.ready.reason.as_str()), (phase::FAILED, "RolledBack"));
    let expected = "FluxCD rolled the release back after release v2 failed: Helm upgrade failed for release \
                    override-rolled-back/override-rolled-back with chart hello@0.1.0: timeout waiting for: \
                    [Deployment/override-rolled-back/override-rolled-back status: 'InProgress']";
    assert_eq!(after.message, expected);
    assert!(seen[..at].iter().all(|after| after.phase != phase::FAILED));
    assert_eq!(last(&seen).phase, phase::FAILED);
}

#[test]
fn a_change_that_was_never_applied_is_a_failure() {
    let seen = replay("override-not-applied");
    never(&seen, phase::READY, Some(2));
    let after = last(&seen);
    assert_eq!((after.phase.as_str(), after.ready.reason.as_str()), (phase::FAILED, "UpgradeFailed"));
    assert!(
        after.message.starts_with("FluxCD reported the release in sync after the change failed: "),
        "{}",
        after.message
    );
    assert!(after.message.contains("doc is missing path") && !after.message.contains("Last Helm logs"));
}

#[test]
fn a_job_that_fails_is_failed_when_flux_gives_up() {
    failed_when_stalled(&replay("job-fails"), 1);
}

#[test]
fn a_chart_that_cannot_render_is_an_error_once_the_retries_are_used() {
    for (name, generation, part) in
        [("template-fails", 2, "broken is set"), ("schema-fails", 1, "got string, want integer")]
    {
        let seen = replay(name);
        never(&seen, phase::READY, Some(generation));
        never(&seen, phase::FAILED, None);
        for after in seen.iter().filter(|after| after.generation == generation) {
            let exceeded = after.line["status"]["failures"].as_i64().unwrap_or_default() > 3;
            assert_eq!(after.display == "Error", exceeded, "{name}: {after:#?}");
            assert!(!exceeded || after.message.contains(part), "{name}: {}", after.message);
        }
        assert_eq!(last(&seen).display, "Error", "{name}");
    }
}

#[test]
fn a_chart_that_is_missing_is_an_error_after_the_timeout() {
    let seen = replay("chart-missing");
    never(&seen, phase::FAILED, None);
    let after = last(&seen);
    assert_eq!((after.phase.as_str(), after.display.as_str()), (phase::RELEASE, "Deploying"));
    assert!(after.message.contains("chart-missing"), "{}", after.message);
    // The same, after the timeout.
    let (driver, settings) = (driver(), Settings::default());
    let mut object = object(1);
    let wanted = Wanted { release: json!({ "kind": "HelmRelease" }), ..Wanted::default() };
    let network = Network::default();
    let begun: Timestamp = "2026-11-29T15:00:00Z".parse().unwrap();
    let at = |object: &mut StyrminDeployment, now: Timestamp| -> Decision {
        let decision = decide(&observed(object, &driver, &wanted, &after.line, None, None, &network), now, &settings);
        object.status = Some(decision.status.clone());
        decision
    };
    for _ in 0..3 {
        at(&mut object, begun);
    }
    let early = at(&mut object, begun + jiff::SignedDuration::from_secs(269));
    assert_eq!(early.status.display_state.as_deref(), Some("Deploying"));
    assert!(early.again.is_some_and(|again| again <= std::time::Duration::from_secs(2)), "{:?}", early.again);
    let late = at(&mut object, begun + jiff::SignedDuration::from_secs(271));
    assert_eq!(
        (late.status.phase.as_deref(), late.status.display_state.as_deref()),
        (Some(phase::RELEASE), Some("Error"))
    );
    let message = late.status.message.unwrap();
    assert!(
        message.starts_with("Deployment did not reach Ready within 270 seconds, phase CreatingHelmRelease: "),
        "{message}"
    );
    assert!(message.contains("chart-missing"), "{message}");
}

#[test]
fn the_end_of_an_older_attempt_does_not_fail_a_newer_change() {
    for name in ["superseded", "killed-mid-upgrade"] {
        let seen = replay(name);
        never(&seen, phase::FAILED, None);
        is_ready(last_of(&seen, 3));
    }
}

#[test]
fn drift_is_no_rollout() {
    let seen = replay("drift");
    let (at, _) = first(&seen, |after| after.phase == phase::READY);
    assert!(seen[at..].iter().all(|after| after.phase == phase::READY));
    assert_eq!(last(&seen).corrections, 1);
}

#[test]
fn a_secret_that_is_late_is_waited_for_by_name() {
    let seen = replay("shape-secret-late");
    never(&seen, phase::FAILED, None);
    let (_, waits) =
        first(&seen, |after| after.condition("Ready", "False").is_some_and(|ready| ready["reason"] == "ValuesError"));
    assert!(waits.message.contains("shape-secret-late-values-655cf9d0f8"), "{}", waits.message);
    is_ready(last(&seen));
}

#[test]
fn a_release_whose_namespace_was_deleted_is_never_failed() {
    let seen = replay("shape-target-namespace-deleted");
    never(&seen, phase::FAILED, None);
    is_ready(last(&seen));
    assert!(seen.iter().any(|after| after.display == "Running"));
}
