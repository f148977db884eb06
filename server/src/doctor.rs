//! What holds and what is broken of the loop between this server and a cluster, link by link, with what to do.
//!
//! [`checks`] decides, and is pure; [`Doctor::examine`] gathers what it rests on: what agents said, and a look at the
//! repository. It writes nothing. A link whose state follows from an earlier one that is broken is not told as broken
//! too.

use crate::changes::Changes;
use crate::clock::Clock;
use crate::reports::FluxStatus;
use crate::repository::{GitError, Host, Probe, Remote, probe};
use crate::store::{Cluster, ClusterFacts, LastReport, Millis, Snapshot, StatusScope, Store, Target};
use async_graphql::{Enum, SimpleObject};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use styrmin_renderer::layout::FLUX_NAMESPACE;
use styrmin_renderer::objects::{AGE_SECRET, FLUX_SOURCE};

/// After so long without a report an agent is silent, as the reference has it.
const SILENT: Duration = Duration::from_secs(60);
/// So far may two clocks differ before certificates, tokens and times in messages are wrong.
const SKEW_MAX: Duration = Duration::from_secs(30);
/// What an agent says of itself is as old as that at most, or nobody knows it any more.
const FACTS_OLD: Duration = Duration::from_secs(1800);
/// An agent says every five minutes that it waits.
const WAITS_OLD: Duration = Duration::from_secs(600);
/// Most objects of Flux that are looked at.
const FLUX_MAX: i64 = 1000;

/// How a link is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Enum)]
pub enum CheckState {
    /// It holds.
    Ok,
    /// It holds, and somebody should look at it.
    Warning,
    /// It is broken.
    Broken,
    /// An earlier link has to hold first.
    Unknown,
}

/// One link.
#[derive(Debug, Clone, PartialEq, Eq, SimpleObject)]
pub struct Check {
    /// Which one, in a few words.
    pub link: &'static str,
    /// How it is.
    pub state: CheckState,
    /// What was found.
    pub message: String,
    /// What to do, unless it holds.
    pub remedy: Option<String>,
}

/// What the checks rest on.
#[derive(Debug)]
pub struct Facts<'a> {
    /// The cluster.
    pub cluster: &'a Cluster,
    /// A look at its repository.
    pub probe: &'a Probe,
    /// The last report.
    pub last: Option<&'a LastReport>,
    /// What the agent says of itself.
    pub said: Option<&'a ClusterFacts>,
    /// For which recipients the cluster can decrypt; `None`: it never said.
    pub decrypts: Option<&'a [String]>,
    /// Flux's objects, as last reported.
    pub flux: &'a [FluxStatus],
    /// The newest commit of the branch that this server knows.
    pub newest: Option<&'a str>,
    /// Now.
    pub now: Millis,
}

/// All links, in the order in which a change passes them.
#[must_use]
pub fn checks(facts: &Facts<'_>) -> Vec<Check> {
    let reached = reachable(facts);
    let reporting = reporting(facts);
    let said = facts.said.filter(|said| !is_older(facts.now, said.said_at, FACTS_OLD));
    let heard = reporting.state == CheckState::Ok;
    let source = match heard.then(|| source(facts)) {
        // What we cannot reach, Flux cannot either.
        Some(found) if found.state == CheckState::Broken && reached.state == CheckState::Broken => {
            after(found.link, &reached)
        }
        Some(found) => found,
        None => after("Flux fetches the repository", &reporting),
    };
    let fetches = matches!(source.state, CheckState::Ok | CheckState::Warning);
    let signatures = signatures(facts, heard);
    let signed = signatures.state != CheckState::Broken;
    let decryption = if heard { decryption(facts) } else { after("Flux decrypts secrets", &reporting) };
    let synced = match (fetches, signed) {
        (true, true) => synced(facts),
        (true, false) => after("Flux has the newest commit", &signatures),
        (false, _) => after("Flux has the newest commit", &source),
    };
    vec![
        reached.clone(),
        if reached.state == CheckState::Ok { writable(facts) } else { after("repository can be written", &reached) },
        reporting.clone(),
        of_agent("agent's version", said, &reporting, version),
        of_agent("kind StyrminDeployment", said, &reporting, kind),
        of_agent("clocks", said, &reporting, clock),
        source,
        signatures,
        synced,
        if heard { applied(facts, &decryption) } else { after("Flux applies the files", &reporting) },
        decryption,
    ]
}

fn check(link: &'static str, state: CheckState, message: String, remedy: Option<String>) -> Check {
    Check { link, state, message, remedy }
}

fn ok(link: &'static str, message: impl Into<String>) -> Check {
    check(link, CheckState::Ok, message.into(), None)
}

fn broken(link: &'static str, message: impl Into<String>, remedy: impl Into<String>) -> Check {
    check(link, CheckState::Broken, message.into(), Some(remedy.into()))
}

fn warning(link: &'static str, message: impl Into<String>, remedy: impl Into<String>) -> Check {
    check(link, CheckState::Warning, message.into(), Some(remedy.into()))
}

/// A link that nobody can judge before another one.
fn after(link: &'static str, other: &Check) -> Check {
    let message = format!("cannot be told: {}", other.link);
    check(link, CheckState::Unknown, message, Some(format!("First: {}", other.link)))
}

fn is_older(now: Millis, at: Millis, than: Duration) -> bool {
    u128::from(now.abs_diff(at)) > than.as_millis() && now > at
}

fn reachable(facts: &Facts<'_>) -> Check {
    const LINK: &str = "repository can be reached";
    let Cluster { branch, git_url, .. } = facts.cluster;
    match (&facts.probe.tip, git_url) {
        (Ok(Some(tip)), _) => ok(LINK, format!("branch {branch} is at {}", short(tip))),
        (Ok(None), _) => warning(
            LINK,
            format!("the repository has no branch {branch}"),
            "Styrmin makes it with the first commit, if it may; if somebody removed it, push it again",
        ),
        (Err(error), Some(url)) => broken(LINK, format!("{url}: {error}"), remedy_of(error)),
        (Err(error), None) => broken(
            LINK,
            format!("the hosted repository: {error}"),
            "Look at the server's log and at the disk of its data folder",
        ),
    }
}

/// What helps against an error of Git.
fn remedy_of(error: &GitError) -> String {
    let words = error.to_string();
    let refused =
        ["uthentication", "Permission denied", "error: 403", "error: 401"].iter().any(|word| words.contains(word));
    match refused {
        true => {
            "Give Styrmin credentials that may read and write: clusters update NAME --git-username … with STYRMIN_GIT_PASSWORD, or --git-ssh-key"
        }
        false => {
            "Check the URL, the network from the server to it, its certificate (--git-ca) and proxy (--git-proxy); clusters update changes them without a restart"
        }
    }
    .to_owned()
}

fn writable(facts: &Facts<'_>) -> Check {
    const LINK: &str = "repository can be written";
    match &facts.probe.push {
        // What protects the branch itself, a forge does not tell before a push.
        Ok(()) => ok(LINK, "the account may push"),
        Err(error) => broken(
            LINK,
            error.to_string(),
            "Give the account or key of Styrmin the right to push to the branch: on a forge a deploy key with write access or a role that may write; or other credentials with clusters update",
        ),
    }
}

fn reporting(facts: &Facts<'_>) -> Check {
    const LINK: &str = "agent reports";
    let recent = |said: &&ClusterFacts| !is_older(facts.now, said.said_at, WAITS_OLD);
    let waits = facts.said.filter(|said| !said.facts.waits_for.is_empty()).filter(recent);
    let waits = waits.filter(|said| facts.last.is_none_or(|last| last.reported_at < said.said_at));
    if let Some(said) = waits {
        return broken(
            LINK,
            format!("it runs, and waits until it can list {}", said.facts.waits_for.join(", ")),
            "Install what is missing: StyrminDeployment comes with the agent's chart (styrmin-agent apply-crds), the others with Flux (its source-, kustomize- and helm-controller; flux.enabled of the chart); or the agent lacks rights: helm upgrade its chart",
        );
    }
    let Some(last) = facts.last else {
        return broken(
            LINK,
            "it never did",
            "Install it: styrminctl clusters bootstrap NAME prints all that is needed. If it runs: kubectl -n styrmin-system logs deployment/styrmin-agent; its server address has to be this server, and its token the one of this cluster",
        );
    };
    let ago = facts.now.saturating_sub(last.reported_at) / 1000;
    if is_older(facts.now, last.reported_at, SILENT) {
        return broken(
            LINK,
            format!("it is silent for {ago} s"),
            "kubectl -n styrmin-system get pods, and logs deployment/styrmin-agent: it says why it cannot reach the server or the API server, or that it has no token",
        );
    }
    ok(LINK, format!("{ago} s ago, by {}", last.identity))
}

/// What the agent says of itself; one of a version before this check says nothing.
fn of_agent(
    link: &'static str,
    said: Option<&ClusterFacts>,
    reporting: &Check,
    judge: fn(&ClusterFacts) -> Check,
) -> Check {
    match said {
        Some(said) => judge(said),
        None if reporting.state == CheckState::Ok => warning(
            link,
            "the agent has not said it",
            "Wait a minute after the agent's start; one of a version before this check never says it: upgrade it (clusters agent NAME)",
        ),
        None => after(link, reporting),
    }
}

fn version(said: &ClusterFacts) -> Check {
    const LINK: &str = "agent's version";
    let (own, theirs) = (env!("CARGO_PKG_VERSION"), &said.facts.version);
    if theirs == own {
        return ok(LINK, theirs);
    }
    warning(
        LINK,
        format!("the agent is {theirs}, the server {own}"),
        "Upgrade the older one: a server works with agents of the version before it and after it, and no further. clusters agent NAME has the agent upgraded through the repository",
    )
}

fn kind(said: &ClusterFacts) -> Check {
    const LINK: &str = "kind StyrminDeployment";
    const REMEDY: &str =
        "helm upgrade the agent's chart, whose Job applies it (crdUpgrade.enabled), or run styrmin-agent apply-crds";
    match said.facts.kind.as_str() {
        "CURRENT" => ok(LINK, "it is the agent's"),
        "MISSING" => broken(LINK, "the cluster does not have it", REMEDY),
        _ => broken(LINK, "it is another one than the agent's: fields may be lost on their way", REMEDY),
    }
}

fn clock(said: &ClusterFacts) -> Check {
    const LINK: &str = "clocks";
    let (size, which) = (said.skew_ms.unsigned_abs(), if said.skew_ms > 0 { "ahead of" } else { "behind" });
    if u128::from(size) <= SKEW_MAX.as_millis() {
        return ok(LINK, "they agree");
    }
    broken(
        LINK,
        format!("the agent's is {} s {which} the server's", size / 1000),
        "Set both by NTP (timedatectl on the node): certificates, tokens and times in messages are wrong otherwise",
    )
}

fn of_flux<'a>(facts: &Facts<'a>, kind: &str) -> Option<&'a FluxStatus> {
    let is = |one: &&FluxStatus| one.kind == kind && one.namespace == FLUX_NAMESPACE && one.name == FLUX_SOURCE;
    facts.flux.iter().find(is)
}

fn said_by(status: &FluxStatus) -> String {
    let message = status.message.as_deref().unwrap_or("it says nothing yet");
    status.reason.as_ref().map_or_else(|| message.to_owned(), |reason| format!("{reason}: {message}"))
}

/// What has Flux go on with an object.
fn resume(kind: &str, name: &str) -> String {
    format!("kubectl -n {FLUX_NAMESPACE} patch {kind} {name} --type=merge -p '{{\"spec\":{{\"suspend\":false}}}}'")
}

/// Whether a source says that it does not trust a commit.
fn distrusts(status: &FluxStatus) -> bool {
    let about = |text: &Option<String>| {
        text.as_ref().is_some_and(|text| text.contains("InvalidCommitSignature") || text.contains("signature"))
    };
    status.ready == "False" && (about(&status.reason) || about(&status.message))
}

fn source(facts: &Facts<'_>) -> Check {
    const LINK: &str = "Flux fetches the repository";
    let Some(source) = of_flux(facts, "GitRepository") else {
        return broken(
            LINK,
            format!("there is no GitRepository {FLUX_NAMESPACE}/{FLUX_SOURCE}"),
            "Install Flux (flux.enabled of the agent's chart, or Flux's own way), then kubectl apply -f flux/styrmin.yaml of the repository; clusters bootstrap NAME prints both",
        );
    };
    if source.suspended {
        return broken(LINK, "it is suspended", resume("gitrepository", FLUX_SOURCE));
    }
    if source.ready == "False" && !distrusts(source) {
        return broken(
            LINK,
            said_by(source),
            format!(
                "Check url and branch in flux/styrmin.yaml and Secret {FLUX_NAMESPACE}/styrmin-git (username, password; with a repository hosted here: agent, and the agent's token), and that pods of {FLUX_NAMESPACE} can reach it"
            ),
        );
    }
    match &source.revision {
        Some(revision) => ok(LINK, revision.clone()),
        None => broken(
            LINK,
            "it has not fetched anything yet",
            format!("Wait a minute; if it stays: kubectl -n {FLUX_NAMESPACE} get pods: is source-controller running?"),
        ),
    }
}

fn signatures(facts: &Facts<'_>, heard: bool) -> Check {
    const LINK: &str = "Flux accepts the signatures";
    if facts.cluster.trusted_keys.is_none() {
        return ok(LINK, "it is not asked to verify commits (clusters create --verify)");
    }
    match of_flux(facts, "GitRepository").filter(|_| heard) {
        Some(source) if distrusts(source) => broken(
            LINK,
            said_by(source),
            format!(
                "Compare Secret {FLUX_NAMESPACE}/styrmin-git-keys with the server's key (signingKey in the API) and the trusted ones: apply flux/styrmin.yaml again after a change of keys; if somebody pushed an unsigned commit, the next commit of Styrmin mends it"
            ),
        ),
        Some(_) => ok(LINK, "the newest commit that it fetched is signed by a trusted key"),
        None => check(
            LINK,
            CheckState::Unknown,
            "cannot be told before Flux fetches".into(),
            Some("First: Flux fetches the repository".into()),
        ),
    }
}

/// The commit of a revision such as `main@sha1:<commit>`.
fn commit_of(revision: &str) -> &str {
    revision.rsplit_once(':').map_or(revision, |(_, commit)| commit)
}

fn synced(facts: &Facts<'_>) -> Check {
    const LINK: &str = "Flux has the newest commit";
    let revision = of_flux(facts, "GitRepository").and_then(|source| source.revision.as_deref());
    match (facts.newest, revision.map(commit_of)) {
        (Some(newest), Some(has)) if newest == has => ok(LINK, short(newest)),
        (Some(newest), has) => warning(
            LINK,
            format!("it has {}, and the newest is {}", has.map_or("none", short), short(newest)),
            format!(
                "Wait a minute: the agent asks Flux to fetch. If it stays: does flux/styrmin.yaml name this repository and branch {}? Does the agent say \"Flux could not be asked to fetch\"?",
                facts.cluster.branch
            ),
        ),
        (None, _) => warning(LINK, "this server has pushed nothing yet", "Look at the repository's two checks above"),
    }
}

fn short(commit: &str) -> &str {
    commit.get(..12).unwrap_or(commit)
}

fn applied(facts: &Facts<'_>, decryption: &Check) -> Check {
    const LINK: &str = "Flux applies the files";
    let Some(root) = of_flux(facts, "Kustomization") else {
        return broken(
            LINK,
            format!("there is no Kustomization {FLUX_NAMESPACE}/{FLUX_SOURCE}"),
            "kubectl apply -f flux/styrmin.yaml of the repository; clusters bootstrap NAME prints it",
        );
    };
    let ours = |one: &&FluxStatus| {
        one.kind == "Kustomization" && (one.name == FLUX_SOURCE || one.name.starts_with("styrmin-"))
    };
    let bad: Vec<&FluxStatus> =
        facts.flux.iter().filter(ours).filter(|one| one.suspended || one.ready == "False").collect();
    let about_keys = |one: &&&FluxStatus| {
        one.message.as_ref().is_some_and(|message| message.contains(AGE_SECRET) || message.contains("decrypt"))
    };
    if decryption.state == CheckState::Broken && !bad.is_empty() && bad.iter().all(|one| about_keys(&one)) {
        return after(LINK, decryption);
    }
    let Some(first) = bad.first() else { return up_to_date(facts, root) };
    let more = if bad.len() > 1 { format!(" (and {} more)", bad.len() - 1) } else { String::new() };
    if first.suspended {
        return broken(
            LINK,
            format!("Kustomization {} is suspended{more}", first.name),
            resume("kustomization", &first.name),
        );
    }
    broken(
        LINK,
        format!("Kustomization {}: {}{more}", first.name, said_by(first)),
        "A file is broken, or the API server refuses an object: styrminctl validate . in a checkout says which line; mend or revert it in Git",
    )
}

/// Nothing says that it failed; whether it was done.
fn up_to_date(facts: &Facts<'_>, root: &FluxStatus) -> Check {
    const LINK: &str = "Flux applies the files";
    let running = format!("kubectl -n {FLUX_NAMESPACE} get pods: is kustomize-controller running?");
    let fetched = of_flux(facts, "GitRepository").and_then(|source| source.revision.as_deref()).map(commit_of);
    match root.revision.as_deref().map(commit_of) {
        None => broken(LINK, "it has not applied anything yet", format!("Wait a minute; if it stays: {running}")),
        Some(applied) if fetched.is_some_and(|fetched| fetched != applied) => warning(
            LINK,
            format!("it has applied {}, and fetched {}", short(applied), fetched.map_or("nothing", short)),
            format!("Wait a minute; if it stays: {running}"),
        ),
        Some(_) => ok(LINK, "every Kustomization of Styrmin is ready"),
    }
}

fn decryption(facts: &Facts<'_>) -> Check {
    const LINK: &str = "Flux decrypts secrets";
    let wanted = &facts.cluster.age_recipients;
    let has = facts.decrypts.unwrap_or_default();
    let put = format!(
        "Put the key into the cluster: kubectl -n {FLUX_NAMESPACE} create secret generic styrmin-age --from-file=age.agekey=FILE --dry-run=client -o yaml | kubectl apply -f - (with the keys that it has, if others are still needed); or name another recipient with clusters update NAME --age-recipient"
    );
    if wanted.is_empty() {
        return warning(
            LINK,
            "the cluster has no age recipient, so no deployment can have secrets",
            "Make a key (age-keygen) and name its recipient with clusters update NAME --age-recipient; clusters bootstrap NAME does both",
        );
    }
    match wanted.iter().filter(|recipient| has.contains(recipient)).count() {
        0 if facts.decrypts.is_none() => check(
            LINK,
            CheckState::Unknown,
            "the agent has not said yet what Flux can decrypt".into(),
            Some("Wait a minute after the agent's start".into()),
        ),
        0 => broken(LINK, format!("Flux has no key for {}", wanted.join(", ")), put),
        known if known < wanted.len() => {
            warning(LINK, format!("Flux has a key for {known} of {} recipients", wanted.len()), put)
        }
        _ => ok(LINK, wanted.join(", ")),
    }
}

/// Gathers.
#[derive(Clone)]
pub struct Doctor {
    /// What is stored.
    pub store: Arc<dyn Store>,
    /// Opens repositories.
    pub changes: Arc<Changes>,
    /// Hosted repositories.
    pub host: Host,
    /// Time.
    pub clock: Arc<dyn Clock>,
    /// Folder for what a look at a repository needs.
    pub folder: PathBuf,
    /// How long one command of Git may take.
    pub limit: Duration,
}

impl Doctor {
    async fn remote(&self, cluster: &Cluster) -> anyhow::Result<Remote> {
        let (access, ..) = self.changes.way_in(cluster)?;
        let hosted = self.host.path(&cluster.id);
        // One that is lost is not made anew by a look.
        let is_there = cluster.git_url.is_some() || tokio::fs::try_exists(&hosted).await?;
        anyhow::ensure!(is_there, "its folder {} is not there", hosted.display());
        self.host.remote(cluster, access).await
    }

    /// Every link of a cluster.
    ///
    /// # Errors
    /// When the database fails.
    pub async fn examine(&self, cluster: &Cluster) -> anyhow::Result<Vec<Check>> {
        let probe = match self.remote(cluster).await {
            Ok(remote) => probe(&remote, &cluster.branch, self.folder.clone(), self.limit).await?,
            Err(error) => {
                let failed =
                    || GitError::Run { what: "opening it".into(), error: std::io::Error::other(format!("{error:#}")) };
                Probe { tip: Err(failed()), push: Err(failed()) }
            }
        };
        let last = self.store.last_report(&cluster.id).await?;
        let said = self.store.facts(&cluster.id).await?;
        let decrypts = self.store.recipients(&cluster.id).await?;
        let rows = self.store.statuses(Snapshot::Flux, StatusScope::Cluster(&cluster.id), None, FLUX_MAX).await?;
        let flux: Vec<FluxStatus> = rows.iter().filter_map(FluxStatus::from_row).collect();
        let target = Target { repository: cluster.repository.clone(), branch: cluster.branch.clone() };
        let newest = self.store.head(&target).await?.map(|(head, _)| head);
        Ok(checks(&Facts {
            cluster,
            probe: &probe,
            last: last.as_ref(),
            said: said.as_ref(),
            decrypts: decrypts.as_deref(),
            flux: &flux,
            newest: newest.as_deref(),
            now: self.clock.now(),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{AgentFacts, EditPolicy};

    const NOW: Millis = 10_000_000;
    const KEY: &str = "age1recipient";

    /// What is known of a cluster, owned.
    struct Case {
        cluster: Cluster,
        probe: Probe,
        last: Option<LastReport>,
        said: Option<ClusterFacts>,
        decrypts: Option<Vec<String>>,
        flux: Vec<FluxStatus>,
        newest: Option<&'static str>,
    }

    fn status(kind: &str) -> FluxStatus {
        FluxStatus {
            kind: kind.into(),
            namespace: FLUX_NAMESPACE.into(),
            name: FLUX_SOURCE.into(),
            ready: "True".into(),
            revision: Some("main@sha1:abc".into()),
            ..FluxStatus::default()
        }
    }

    /// Everything holds.
    fn whole() -> Case {
        let text = |text: &str| text.to_owned();
        Case {
            cluster: Cluster {
                id: text("c"),
                name: text("prod"),
                config: Default::default(),
                version: 1,
                git_url: Some(text("https://git.example.com/r")),
                repository: text("git.example.com/r"),
                branch: text("main"),
                path: String::new(),
                credentials: None,
                age_recipients: vec![text(KEY)],
                edit_policy: EditPolicy::Adopt,
                removal_threshold: 0,
                trusted_keys: Some(Vec::new()),
                delivery: Default::default(),
                forge: None,
                forge_secrets: None,
                created_at: 1,
            },
            probe: Probe { tip: Ok(Some(text("abc"))), push: Ok(()) },
            last: Some(LastReport {
                cluster_id: text("c"),
                cluster_uid: text("uid"),
                identity: text("agent-1"),
                epoch: 1,
                sequence: 1,
                reported_at: NOW - 1000,
                pods_at: None,
                pods_digest: None,
                deployments_at: None,
                deployments_digest: None,
                flux_at: None,
                flux_digest: None,
            }),
            said: Some(ClusterFacts {
                cluster_id: text("c"),
                epoch: 1,
                facts: AgentFacts {
                    version: env!("CARGO_PKG_VERSION").into(),
                    kind: text("CURRENT"),
                    waits_for: vec![],
                },
                skew_ms: 0,
                said_at: NOW - 1000,
            }),
            decrypts: Some(vec![text(KEY)]),
            flux: vec![status("GitRepository"), status("Kustomization")],
            newest: Some("abc"),
        }
    }

    fn of(case: &Case) -> Vec<Check> {
        checks(&Facts {
            cluster: &case.cluster,
            probe: &case.probe,
            last: case.last.as_ref(),
            said: case.said.as_ref(),
            decrypts: case.decrypts.as_deref(),
            flux: &case.flux,
            newest: case.newest,
            now: NOW,
        })
    }

    fn failed() -> GitError {
        GitError::Timeout { what: "looking".into(), limit: Duration::from_secs(1) }
    }

    #[test]
    fn what_is_whole_is_told_as_whole() {
        for check in of(&whole()) {
            assert_eq!((check.state, check.remedy), (CheckState::Ok, None), "{}: {}", check.link, check.message);
        }
    }

    #[test]
    fn a_broken_link_is_the_only_one_that_is_told_as_broken() {
        type Break = fn(&mut Case);
        let table: [(&str, CheckState, Break); 20] = [
            ("repository can be reached", CheckState::Broken, |case| case.probe.tip = Err(failed())),
            ("repository can be reached", CheckState::Warning, |case| case.probe.tip = Ok(None)),
            ("repository can be written", CheckState::Broken, |case| case.probe.push = Err(failed())),
            ("agent reports", CheckState::Broken, |case| (case.last, case.said) = (None, None)),
            ("agent reports", CheckState::Broken, |case| case.last.as_mut().unwrap().reported_at = NOW - 61_000),
            ("agent reports", CheckState::Broken, |case| {
                case.last = None;
                case.said.as_mut().unwrap().facts.waits_for = vec!["HelmRelease".into()];
            }),
            ("agent's version", CheckState::Warning, |case| case.said.as_mut().unwrap().facts.version = "0.0.1".into()),
            ("agent's version", CheckState::Warning, |case| case.said = None),
            ("kind StyrminDeployment", CheckState::Broken, |case| {
                case.said.as_mut().unwrap().facts.kind = "MISSING".into();
            }),
            ("kind StyrminDeployment", CheckState::Broken, |case| {
                case.said.as_mut().unwrap().facts.kind = "OTHER".into();
            }),
            ("clocks", CheckState::Broken, |case| case.said.as_mut().unwrap().skew_ms = -31_000),
            ("Flux fetches the repository", CheckState::Broken, |case| drop(case.flux.remove(0))),
            ("Flux fetches the repository", CheckState::Broken, |case| case.flux[0].suspended = true),
            ("Flux fetches the repository", CheckState::Broken, |case| case.flux[0].revision = None),
            ("Flux accepts the signatures", CheckState::Broken, |case| {
                (case.flux[0].ready, case.flux[0].reason) = ("False".into(), Some("InvalidCommitSignature".into()));
            }),
            ("Flux has the newest commit", CheckState::Warning, |case| case.newest = Some("def")),
            ("Flux applies the files", CheckState::Broken, |case| drop(case.flux.remove(1))),
            ("Flux applies the files", CheckState::Broken, |case| case.flux[1].revision = None),
            ("Flux applies the files", CheckState::Warning, |case| {
                case.flux[1].revision = Some("main@sha1:old".into());
            }),
            ("Flux decrypts secrets", CheckState::Broken, |case| {
                case.decrypts = Some(vec!["age1other".into()]);
                let shard = FluxStatus {
                    name: "styrmin-e-s0".into(),
                    ready: "False".into(),
                    message: Some("secrets \"styrmin-age\" not found".into()),
                    ..status("Kustomization")
                };
                case.flux.push(shard);
            }),
        ];
        for (link, state, breaks) in table {
            let mut case = whole();
            breaks(&mut case);
            let found = of(&case);
            let this = found.iter().find(|check| check.link == link).unwrap();
            assert_eq!(this.state, state, "{link}: {}", this.message);
            assert!(this.remedy.is_some(), "{link}: what to do");
            let broken: Vec<&str> =
                found.iter().filter(|check| check.state == CheckState::Broken).map(|check| check.link).collect();
            assert!(broken.iter().all(|other| *other == link), "{link}: {broken:?}");
        }
    }
}
