//! What a HelmRelease says about a rollout. Pure: objects in, a verdict out.
//!
//! The rules are those of the reference ("When a rollout is ready or failed"), made stricter where
//! the recorded behaviour of helm-controller shows them to be too weak: what is said of one
//! generation never counts for another.

use jiff::Timestamp;
use serde_json::Value;
use styrmin_renderer::post_render::CONTAINER_NOT_FOUND;

/// Where a rollout stands, as Flux sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// The release is installed as asked and its objects are ready.
    Ready,
    /// Flux works, or waits for something.
    Progressing(Seen),
    /// Flux will not try again.
    Failed {
        /// Reason of the Ready condition.
        reason: String,
        /// For people.
        message: String,
        /// What Flux says beside it.
        seen: Seen,
    },
    /// Flux tries the same again without end: it is not final, but somebody has to look.
    Error {
        /// For people.
        message: String,
        /// What Flux says beside it.
        seen: Seen,
    },
}

/// Conditions of a HelmRelease, as the operator copies them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Seen {
    /// Becomes HelmReleaseReady.
    pub ready: Option<Copied>,
    /// Becomes HelmReleaseRemediated.
    pub remediated: Option<Copied>,
}

impl Seen {
    /// Why Flux does not get on.
    #[must_use]
    pub fn complaint(&self) -> Option<&str> {
        self.ready.as_ref().filter(|ready| ready.status == "False").map(|ready| ready.message.as_str())
    }
}

/// A condition of Flux.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Copied {
    /// True, False or Unknown.
    pub status: String,
    /// One word.
    pub reason: String,
    /// A sentence.
    pub message: String,
    /// When the status last changed (RFC 3339).
    pub since: String,
}

/// The newest event of a HelmRelease that reports a failed install or upgrade.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FailureEvent {
    /// InstallFailed or UpgradeFailed; whoever gathers it may know a better one.
    pub reason: String,
    /// Flux's message; what it appends of Helm's log is cut off.
    pub message: String,
    /// When it happened last.
    pub at: Timestamp,
}

impl FailureEvent {
    /// Reads an Event; `None` when it reports something else.
    #[must_use]
    pub fn read(event: &Value) -> Option<Self> {
        let reason = event["reason"].as_str().filter(|reason| matches!(*reason, "InstallFailed" | "UpgradeFailed"))?;
        let at = ["lastTimestamp", "eventTime", "firstTimestamp"].iter().find_map(|name| event[*name].as_str())?;
        let message = event["message"].as_str().unwrap_or_default();
        Some(Self {
            reason: reason.to_owned(),
            message: message.split("\n\nLast Helm logs:").next().unwrap_or_default().to_owned(),
            at: at.parse().ok()?,
        })
    }
}

/// Reasons for which Flux has not begun: they come before any attempt.
const BEFORE: [&str; 4] = ["SourceNotReady", "ArtifactFailed", "ValuesError", "DependencyNotReady"];

/// Judges a HelmRelease whose spec is what the operator wants. `retries` is what its spec allows.
#[must_use]
pub fn judge(release: &Value, failure: Option<&FailureEvent>, retries: u32) -> Verdict {
    let release = Release { object: release };
    let seen = release.seen();
    let attempted = release.attempted();
    let failed = |reason: &str, message: String| Verdict::Failed { reason: reason.into(), message, seen: seen.clone() };
    if attempted && let Some(stalled) = release.condition("Stalled", "True") {
        let why = release.failure().map_or_else(String::new, |message| format!(": {message}"));
        return failed(text(&stalled["reason"]), format!("{}{why}", text(&stalled["message"])));
    }
    // The chart will not have it at another attempt either.
    if attempted && let Some(message) = release.failure().filter(|message| message.starts_with(CONTAINER_NOT_FOUND)) {
        return failed(CONTAINER_NOT_FOUND, message.to_owned());
    }
    let reconciles = release.any("Reconciling");
    // The end of a pass that began before the change is stamped with its generation too.
    if !reconciles && attempted && release.condition("Ready", "True").is_some() {
        if release.number("failures") > 0 {
            if let Some((version, since)) = release.rolled_back() {
                let of_it = failure.filter(|event| since.is_none_or(|since| event.at >= since));
                if let Some(event) = of_it.filter(|event| event.reason == CONTAINER_NOT_FOUND) {
                    return failed(&event.reason, event.message.clone());
                }
                let why = of_it.map_or_else(String::new, |event| format!(": {}", event.message));
                return failed(
                    "RolledBack",
                    format!("FluxCD rolled the release back after release v{version} failed{why}"),
                );
            }
            if let Some(event) = failure.filter(|event| release.older_than(event.at)) {
                let message = if event.reason == CONTAINER_NOT_FOUND {
                    event.message.clone()
                } else {
                    format!("FluxCD reported the release in sync after the change failed: {}", event.message)
                };
                return failed(&event.reason, message);
            }
        }
        return Verdict::Ready;
    }
    let stored = release.number("installFailures") + release.number("upgradeFailures");
    if attempted
        && stored == 0
        && release.number("failures") > i64::from(retries)
        && let Some(message) = release.failure()
    {
        return Verdict::Error { message: message.to_owned(), seen };
    }
    Verdict::Progressing(release.unless_suspended(seen))
}

/// Whether Flux counts a failure for what it was asked for last.
#[must_use]
pub fn has_failed(release: &Value) -> bool {
    let release = Release { object: release };
    let counts = ["failures", "installFailures", "upgradeFailures"];
    release.attempted()
        && (release.condition("Stalled", "True").is_some() || counts.iter().any(|name| release.number(name) > 0))
}

/// Asks Flux to forget its failures and to try once more whatever it finds. The values are times: it does so for
/// each new one once, as it does for `flux reconcile helmrelease --reset --force`.
pub const RESET: [&str; 3] =
    ["reconcile.fluxcd.io/forceAt", "reconcile.fluxcd.io/requestedAt", "reconcile.fluxcd.io/resetAt"];

/// Whether Flux has done what it was asked `at` this time, or somebody later.
#[must_use]
pub fn was_reset(release: &Value, at: &str) -> bool {
    let handled = text(&release["status"]["lastHandledResetAt"]);
    let times = handled.parse::<Timestamp>().ok().zip(at.parse::<Timestamp>().ok());
    handled == at || times.is_some_and(|(handled, at)| handled >= at)
}

/// What Flux says of an uninstall that fails.
#[must_use]
pub fn uninstall_failed(release: &Value) -> Option<String> {
    let conditions = release["status"]["conditions"].as_array().into_iter().flatten();
    let failed = |condition: &&Value| condition["status"] == "False" && condition["reason"] == "UninstallFailed";
    conditions.clone().find(failed).map(|condition| text(&condition["message"]).to_owned())
}

/// Whether the newest release was deployed before `at`.
#[must_use]
pub fn deployed_before(release: &Value, at: Timestamp) -> bool {
    Release { object: release }.older_than(at)
}

/// What Flux says of drift that it puts back; `None` when it finds none.
#[must_use]
pub fn drifted(release: &Value) -> Option<Copied> {
    Release { object: release }.condition("Drifted", "True").map(Release::copy)
}

struct Release<'a> {
    object: &'a Value,
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

impl<'a> Release<'a> {
    fn generation(&self) -> Option<i64> {
        self.object["metadata"]["generation"].as_i64()
    }

    fn number(&self, name: &str) -> i64 {
        self.object["status"][name].as_i64().unwrap_or_default()
    }

    /// Whether Flux has attempted this generation.
    fn attempted(&self) -> bool {
        let attempted = self.object["status"]["lastAttemptedGeneration"].as_i64();
        attempted.is_some() && attempted == self.generation()
    }

    fn conditions(&self) -> impl Iterator<Item = &'a Value> {
        self.object["status"]["conditions"].as_array().into_iter().flatten()
    }

    /// A condition of this kind, whatever it says and of which generation.
    fn any(&self, kind: &str) -> bool {
        self.conditions().any(|condition| condition["type"] == kind)
    }

    /// A condition of the current generation.
    fn condition(&self, kind: &str, status: &str) -> Option<&'a Value> {
        self.conditions().find(|condition| {
            let of = condition["observedGeneration"].as_i64();
            let current = of.map_or_else(|| self.attempted(), |of| Some(of) == self.generation());
            condition["type"] == kind && condition["status"] == status && current
        })
    }

    /// The message of the failure that counts for this generation.
    fn failure(&self) -> Option<&'a str> {
        let found = self.condition("Released", "False").or_else(|| self.condition("Ready", "False"))?;
        found["message"].as_str()
    }

    fn copy(condition: &Value) -> Copied {
        Copied {
            status: text(&condition["status"]).into(),
            reason: text(&condition["reason"]).into(),
            message: text(&condition["message"]).into(),
            since: text(&condition["lastTransitionTime"]).into(),
        }
    }

    /// What the operator copies: nothing that was said of another generation. A failure also needs
    /// that this generation was attempted: Flux stamps the end of an older attempt with the newest
    /// generation.
    fn seen(&self) -> Seen {
        let ready = ["Unknown", "True", "False"].iter().find_map(|status| self.condition("Ready", status));
        let ready = ready.filter(|ready| {
            let reason = text(&ready["reason"]);
            ready["status"] != "False" || self.attempted() || BEFORE.contains(&reason)
        });
        let ready = ready.map(|ready| {
            let mut copied = Self::copy(ready);
            // After a rollback Ready speaks of the rollback; Released names what failed.
            if ready["status"] == "False"
                && let Some(released) = self.condition("Released", "False")
            {
                copied.reason = text(&released["reason"]).into();
                copied.message = text(&released["message"]).into();
            }
            // While Flux still works, or has not come to this generation, True speaks too early.
            if ready["status"] == "True" && (self.any("Reconciling") || !self.attempted()) {
                copied.status = "Unknown".into();
                copied.reason = "Progressing".into();
            }
            copied
        });
        let remediated = self.condition("Remediated", "True").filter(|_| self.attempted()).map(Self::copy);
        Seen { ready, remediated }
    }

    /// While somebody has suspended the release, that is what Flux waits for.
    fn unless_suspended(&self, seen: Seen) -> Seen {
        if self.object["spec"]["suspend"] != true {
            return seen;
        }
        let part = |name: &str| text(&self.object["metadata"][name]);
        let (namespace, name) = (part("namespace"), part("name"));
        let message = format!(
            "HelmRelease {namespace}/{name} is suspended: Flux does nothing until somebody resumes it (flux resume \
             helmrelease {name} -n {namespace})"
        );
        let [status, reason, since] = ["False", "Suspended", ""].map(str::to_owned);
        Seen { ready: Some(Copied { status, reason, message, since }), ..seen }
    }

    /// Version of the failed release that the newest one was rolled back from, and when that was deployed.
    fn rolled_back(&self) -> Option<(i64, Option<Timestamp>)> {
        let stored = self.number("installFailures") + self.number("upgradeFailures");
        let mut history: Vec<&Value> = self.object["status"]["history"].as_array()?.iter().collect();
        history.sort_by_key(|entry| std::cmp::Reverse(entry["version"].as_i64()));
        let (newest, before) = (history.first()?, history.get(1)?);
        let is = stored > 0 && newest["status"] == "deployed" && before["status"] == "failed";
        let deployed = before["lastDeployed"].as_str().and_then(|at| at.parse().ok());
        is.then(|| (before["version"].as_i64().unwrap_or_default(), deployed))
    }

    /// Whether the newest release was deployed before `at`.
    fn older_than(&self, at: Timestamp) -> bool {
        let history = self.object["status"]["history"].as_array().into_iter().flatten();
        let newest = history.max_by_key(|entry| entry["version"].as_i64());
        let deployed = newest.and_then(|entry| entry["lastDeployed"].as_str()?.parse::<Timestamp>().ok());
        deployed.is_none_or(|deployed| deployed < at)
    }
}
