//! Why something waits or failed, in words for people. Pure.

use super::status::{ContainerStatus, DeploymentStatus, FluxStatus, PodStatus};
use crate::store::{TEARDOWN, TimelineKind};
use styrmin_renderer::layout::FLUX_NAMESPACE;
use styrmin_renderer::objects::FLUX_SOURCE;

/// Reasons of a container that explain a failure.
const BAD_REASONS: [&str; 8] = [
    "ImagePullBackOff",
    "ErrImagePull",
    "InvalidImageName",
    "CrashLoopBackOff",
    "CreateContainerConfigError",
    "CreateContainerError",
    "Error",
    "OOMKilled",
];
/// Most pods that an error names.
const PODS_NAMED: usize = 5;
/// Most characters of a container's message in an error, and of all that is said about one pod.
const MESSAGE_MAX: usize = 300;
const POD_MAX: usize = 2000;

/// Lines about pods with containers that explain a failure.
pub(super) fn pods<'a>(found: impl IntoIterator<Item = &'a PodStatus>) -> Vec<String> {
    found.into_iter().filter_map(pod).take(PODS_NAMED).collect()
}

fn pod(pod: &PodStatus) -> Option<String> {
    let containers: Vec<String> = pod.containers.iter().filter_map(container).collect();
    let line = || format!("pod {}: {}", pod.name, containers.join(", ")).chars().take(POD_MAX).collect();
    (!containers.is_empty()).then(line)
}

fn container(container: &ContainerStatus) -> Option<String> {
    let reason = container.reason.as_deref().filter(|reason| BAD_REASONS.contains(reason))?;
    if container.state == "running" {
        return None;
    }
    let message = match container.message.as_deref().filter(|message| !message.is_empty()) {
        Some(message) => format!(" ({})", message.chars().take(MESSAGE_MAX).collect::<String>()),
        None => String::new(),
    };
    Some(format!("container {}: {reason}{message}", container.name))
}

/// What an object shows now that it did not show before, for the timeline: kind, word, sentence.
pub(super) fn shown(
    before: Option<&DeploymentStatus>,
    now: &DeploymentStatus,
) -> Vec<(TimelineKind, String, Option<String>)> {
    let mut found = Vec::new();
    let phase = now.phase.clone().filter(|phase| before.and_then(|before| before.phase.as_ref()) != Some(phase));
    if let Some(phase) = phase {
        found.push((TimelineKind::Phase, phase, now.message.clone()));
    }
    // The operator's word for a removal that somebody asked for or confirmed.
    let teardown = |status: &DeploymentStatus| {
        let ready = status.conditions.iter().find(|condition| condition.kind == "Ready");
        ready.filter(|ready| status.deleting && ready.reason == "Deleting").map(|ready| ready.message.clone())
    };
    if let Some(message) = teardown(now).filter(|_| before.and_then(teardown).is_none()) {
        found.push((TimelineKind::Phase, TEARDOWN.to_owned(), Some(message)));
    }
    let corrections = |status: &DeploymentStatus| status.drift_corrections.unwrap_or_default();
    if before.is_some_and(|before| corrections(now) > corrections(before)) {
        let drifted = now.conditions.iter().find(|condition| condition.kind == "Drifted");
        let message = drifted.map(|condition| condition.message.clone());
        found.push((TimelineKind::Drift, format!("correction {}", corrections(now)), message));
    }
    found
}

/// Why a commit is not in the cluster yet: the first thing on its way that hinders it.
/// `kustomization` is the one of the deployment's shard, `revision` the commit that is waited for,
/// `newest` the newest commit of ours, which contains it.
pub(super) fn flux(
    statuses: &[FluxStatus],
    kustomization: &str,
    revision: Option<&str>,
    newest: Option<&str>,
) -> String {
    let find = |kind: &str, name: &str| {
        statuses.iter().find(|found| found.kind == kind && found.namespace == FLUX_NAMESPACE && found.name == name)
    };
    let has = |found: &FluxStatus| {
        let at = found.revision.as_deref().unwrap_or_default();
        [revision, newest].into_iter().flatten().any(|commit| at.ends_with(commit))
    };
    let missing = |kind: &str, name: &str| format!("{kind} {FLUX_NAMESPACE}/{name} is not in the cluster yet");
    let Some(source) = find("GitRepository", FLUX_SOURCE) else { return missing("GitRepository", FLUX_SOURCE) };
    let behind = |found: &FluxStatus| match (&found.revision, revision) {
        (Some(at), Some(revision)) => format!("Flux has {} (this commit: {})", short(at), short(revision)),
        (None, Some(revision)) => format!("Flux has no revision yet (this commit: {})", short(revision)),
        (Some(at), None) => format!("Flux has {}", short(at)),
        (None, None) => "Flux has no revision yet".to_owned(),
    };
    if !has(source) {
        return hindered(source).unwrap_or_else(|| behind(source));
    }
    let Some(shard) = find("Kustomization", kustomization) else {
        // The root Kustomization brings it.
        let root = find("Kustomization", FLUX_SOURCE).and_then(hindered);
        return root.unwrap_or_else(|| missing("Kustomization", kustomization));
    };
    if !has(shard) {
        return hindered(shard).unwrap_or_else(|| behind(shard));
    }
    format!(
        "Flux has applied {}; waiting for the agent to see the object",
        short(source.revision.as_deref().unwrap_or_default())
    )
}

/// Why this object of Flux does not do its work.
pub(super) fn hindered(found: &FluxStatus) -> Option<String> {
    let name = format!("{} {}/{}", found.kind, found.namespace, found.name);
    if found.suspended {
        return Some(format!("{name}: is suspended; resume it"));
    }
    if found.ready == "True" {
        return None;
    }
    let words = [&found.message, &found.reason].into_iter().flatten().find(|text| !text.is_empty());
    Some(format!("{name}: {}", words.map_or("is not ready", String::as_str)))
}

/// A revision with ten digits of its commit.
fn short(revision: &str) -> String {
    let (branch, commit) = match revision.rsplit_once(':') {
        Some((branch, commit)) => (format!("{branch}:"), commit),
        None => (String::new(), revision),
    };
    format!("{branch}{}", commit.get(..10).unwrap_or(commit))
}

#[cfg(test)]
mod tests {
    use super::super::status::Condition;
    use super::*;

    #[test]
    fn phases_and_corrections_are_shown_once() {
        let status = |phase: Option<&str>, corrections: Option<i64>| DeploymentStatus {
            phase: phase.map(str::to_owned),
            drift_corrections: corrections,
            message: Some("why".into()),
            conditions: vec![Condition {
                kind: "Drifted".into(),
                message: "Put back x".into(),
                ..Condition::default()
            }],
            ..DeploymentStatus::default()
        };
        let (ready, failed) = (status(Some("Ready"), None), status(Some("Failed"), Some(1)));
        let phase = |name: &str| (TimelineKind::Phase, name.to_owned(), Some("why".to_owned()));
        let drift = (TimelineKind::Drift, "correction 1".to_owned(), Some("Put back x".to_owned()));
        assert_eq!(shown(None, &ready), [phase("Ready")]);
        assert_eq!(shown(Some(&ready), &ready), []);
        assert_eq!(shown(Some(&ready), &failed), [phase("Failed"), drift.clone()]);
        assert_eq!(shown(Some(&ready), &status(Some("Ready"), Some(1))), [drift]);
        assert_eq!(shown(None, &status(None, Some(7))), [], "what was before nobody knows");
    }

    fn with(name: &str, containers: &[(&str, &str, Option<&str>, Option<&str>)]) -> PodStatus {
        let containers = containers.iter().map(|(name, state, reason, message)| ContainerStatus {
            name: (*name).into(),
            state: (*state).into(),
            reason: reason.map(str::to_owned),
            message: message.map(str::to_owned),
            ..ContainerStatus::default()
        });
        PodStatus { name: name.into(), containers: containers.collect(), ..PodStatus::default() }
    }

    #[test]
    fn an_error_names_pods_with_containers_that_explain_it() {
        let mut all = vec![
            with("good", &[("web", "running", None, None)]),
            with("done", &[("web", "terminated", Some("Completed"), None)]),
            with("new", &[("web", "waiting", Some("ContainerCreating"), None)]),
            with("up", &[("web", "running", Some("Error"), None)]),
            with(
                "two",
                &[
                    ("a", "waiting", Some("ImagePullBackOff"), Some("no such image")),
                    ("b", "terminated", Some("OOMKilled"), None),
                    ("c", "running", None, None),
                ],
            ),
        ];
        assert_eq!(pods(&all), ["pod two: container a: ImagePullBackOff (no such image), container b: OOMKilled"]);
        all.extend(BAD_REASONS.map(|reason| with("more", &[("a", "waiting", Some(reason), Some(&"ä".repeat(400)))])));
        let lines = pods(&all);
        assert_eq!(lines.len(), 5, "no more than five pods");
        assert!(lines[1].ends_with(&format!("({})", "ä".repeat(300))), "{}", lines[1]);
    }

    #[test]
    fn the_first_hindrance_on_the_way_is_named() {
        let object = |kind: &str, name: &str, ready: &str, revision: Option<&str>| FluxStatus {
            kind: kind.into(),
            namespace: "flux-system".into(),
            name: name.into(),
            ready: ready.into(),
            message: (ready != "True").then(|| "its reason".to_owned()),
            revision: revision.map(|commit| format!("main@sha1:{commit}")),
            ..FluxStatus::default()
        };
        let (old, new) = ("a".repeat(40), "b".repeat(40));
        let newer = "c".repeat(40);
        let source = |ready: &str, at: &str| object("GitRepository", "styrmin", ready, Some(at));
        let shard = |ready: &str, at: &str| object("Kustomization", "styrmin-e-000", ready, Some(at));
        let root = |ready: &str| object("Kustomization", "styrmin", ready, Some(&new));
        let suspended = FluxStatus { suspended: true, ..source("True", &old) };
        for (statuses, expected) in [
            (vec![], "GitRepository flux-system/styrmin is not in the cluster yet"),
            (vec![source("False", &old)], "GitRepository flux-system/styrmin: its reason"),
            (
                vec![source("False", &new), shard("True", &old)],
                "Flux has main@sha1:aaaaaaaaaa (this commit: bbbbbbbbbb)",
            ),
            (vec![suspended], "GitRepository flux-system/styrmin: is suspended; resume it"),
            (vec![source("True", &old)], "Flux has main@sha1:aaaaaaaaaa (this commit: bbbbbbbbbb)"),
            (
                vec![object("GitRepository", "styrmin", "True", None)],
                "Flux has no revision yet (this commit: bbbbbbbbbb)",
            ),
            (vec![source("True", &new)], "Kustomization flux-system/styrmin-e-000 is not in the cluster yet"),
            (vec![source("True", &new), root("False")], "Kustomization flux-system/styrmin: its reason"),
            (
                vec![source("True", &new), root("False"), shard("False", &old)],
                "Kustomization flux-system/styrmin-e-000: its reason",
            ),
            (
                vec![source("True", &newer), shard("True", &old)],
                "Flux has main@sha1:aaaaaaaaaa (this commit: bbbbbbbbbb)",
            ),
            (
                vec![source("True", &newer), shard("True", &newer)],
                "Flux has applied main@sha1:cccccccccc; waiting for the agent to see the object",
            ),
        ] {
            assert_eq!(flux(&statuses, "styrmin-e-000", Some(&new), Some(&newer)), expected);
        }
    }
}
