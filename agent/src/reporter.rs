//! The reporter: whole snapshots of the cluster's state to the server, of which only what differs is sent. It
//! writes nothing in the cluster.
//!
//! A snapshot is made from stores that are replaced as a whole, after every first list was complete: it
//! is never built from half of one. A round comes every few seconds, or soon after something changed; when
//! nothing differs it says just that, by the digest of all that was sent. When the server has something else it
//! asks for the whole.

use crate::server::{self, Server};
use crate::settings::Settings;
use crate::snapshot::{self, Sent, Source, mark};
use crate::watch::{Changed, Watch};
use crate::{kept, rows, store};
use anyhow::Context as _;
use k8s_openapi::api::core::v1::Namespace;
use kube::Client;
use kube::api::Api;
use std::sync::Arc;
use std::time::Duration;
use styrmin_renderer::layout::FLUX_NAMESPACE;
use tokio::sync::broadcast;
use tokio_util::sync::CancellationToken;
use tracing::warn;

/// How soon a change is reported: several that come together go in one report.
const SOON: Duration = Duration::from_millis(500);
/// How long one round of reports may take.
const REPORT_LIMIT: Duration = Duration::from_secs(180);
/// Longest pause after reports that failed.
const PAUSE_MAX: Duration = Duration::from_secs(30);

/// The kinds of snapshots, in the order in which they are sent: a failed step names the pods that the server
/// knows, so pods come first.
const KINDS: [Kind; 3] = [
    Kind {
        mutation: "mutation($agent: AgentInput!, $items: [PodStatusInput!]!, $digest: String, $delta: DeltaInput) { report: reportPodStatuses(agent: $agent, pods: $items, digest: $digest, delta: $delta) { newestRevision confirmedDeletions { deploymentId uid } } }",
        sources: pods,
    },
    Kind {
        mutation: "mutation($agent: AgentInput!, $items: [DeploymentStatusInput!]!, $digest: String, $delta: DeltaInput) { report: reportDeploymentStatuses(agent: $agent, deployments: $items, digest: $digest, delta: $delta) { newestRevision confirmedDeletions { deploymentId uid } } }",
        sources: deployments,
    },
    Kind {
        mutation: "mutation($agent: AgentInput!, $items: [FluxStatusInput!]!, $digest: String, $delta: DeltaInput) { report: reportFluxStatuses(agent: $agent, statuses: $items, digest: $digest, delta: $delta) { newestRevision confirmedDeletions { deploymentId uid } } }",
        sources: flux_statuses,
    },
];
/// Position of the StyrminDeployments in [`KINDS`]: by them, or by the word that they are as before, every task
/// moves that can.
const DEPLOYMENTS: usize = 1;

/// One kind of snapshot.
struct Kind {
    mutation: &'static str,
    sources: fn(&Watch) -> Box<dyn Iterator<Item = Source> + '_>,
}

/// Reports until `stop`.
pub async fn run(client: Client, watch: Arc<Watch>, server: Arc<Server>, settings: Settings, stop: CancellationToken) {
    let mut reporter = Reporter { client, watch, server, cluster: None, sent: Default::default() };
    let interval = Duration::from_secs(settings.report_interval.into());
    let mut changes = reporter.watch.changes();
    let mut pause = Duration::ZERO;
    loop {
        let next = tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(interval.max(pause)) => None,
            change = changed(&mut changes), if pause.is_zero() => Some(change),
        };
        if next.is_some() {
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(SOON) => {}
            }
            while changes.try_recv().is_ok() {}
        }
        let report = tokio::select! {
            () = stop.cancelled() => return,
            report = tokio::time::timeout(REPORT_LIMIT, reporter.report()) => report,
        };
        let late = |_| Err(anyhow::anyhow!("the server did not take the report within {} s", REPORT_LIMIT.as_secs()));
        pause = match report.unwrap_or_else(late) {
            Ok(()) => Duration::ZERO,
            Err(error) if server::is_stale(&error) => {
                warn!(error = format!("{error:#}"), "the server hears another agent; this one ends");
                stop.cancel();
                return;
            }
            Err(error) => {
                let pause = (pause * 2).clamp(Duration::from_secs(1), PAUSE_MAX);
                warn!(error = format!("{error:#}"), retry_in_s = pause.as_secs(), "a report failed");
                // What was sent stays noted: if the server does not have it, it asks for the whole.
                pause
            }
        };
    }
}

/// A change that a report shows.
async fn changed(changes: &mut broadcast::Receiver<Changed>) {
    while let Err(broadcast::error::RecvError::Closed) = changes.recv().await {
        std::future::pending::<()>().await;
    }
}

struct Reporter {
    client: Client,
    watch: Arc<Watch>,
    server: Arc<Server>,
    /// UID of the kube-system namespace.
    cluster: Option<String>,
    /// What the server has of each kind.
    sent: [Option<Sent>; 3],
}

impl Reporter {
    async fn report(&mut self) -> anyhow::Result<()> {
        let cluster = match &self.cluster {
            Some(cluster) => cluster.clone(),
            None => {
                let api: Api<Namespace> = Api::all(self.client.clone());
                let found = api.get("kube-system").await;
                let found = found.context("reading Namespace kube-system, whose UID names the cluster")?;
                let uid = found.metadata.uid.unwrap_or_default();
                self.cluster = Some(uid.clone());
                uid
            }
        };
        let mut round = self.round(&cluster).await;
        if round.as_ref().is_err_and(server::wants_the_whole) {
            self.sent = Default::default();
            round = self.round(&cluster).await;
        }
        round
    }

    /// Sends what differs, or that nothing does.
    async fn round(&mut self, cluster: &str) -> anyhow::Result<()> {
        let mut failure = None;
        let mut sent_deployments = false;
        for (position, of) in KINDS.iter().enumerate() {
            let (message, now) = snapshot::message((of.sources)(&self.watch), self.sent[position].as_ref());
            let Some(message) = message else {
                // The server has all of it; the marks may be other ones.
                self.sent[position] = Some(now);
                continue;
            };
            match self.server.report(of.mutation, cluster, message).await {
                Ok(confirms) => {
                    self.look_again(confirms);
                    sent_deployments |= position == DEPLOYMENTS;
                    self.sent[position] = Some(now);
                }
                Err(error) if server::is_stale(&error) || server::wants_the_whole(&error) => return Err(error),
                // One kind that cannot be sent must not silence the others.
                Err(error) => failure = failure.or(Some(error)),
            }
        }
        if let Some(failure) = failure {
            return Err(failure);
        }
        if let [Some(pods), Some(deployments), Some(flux)] = &self.sent
            && !sent_deployments
        {
            let digests = [pods.digest(), deployments.digest(), flux.digest()];
            let confirms = self.server.unchanged(cluster, digests).await?;
            self.look_again(confirms);
        }
        Ok(())
    }

    /// A confirmed deletion is a reason to look again.
    fn look_again(&self, confirms: bool) {
        if confirms {
            self.watch.tell(Changed::Everything);
        }
    }
}

/// The pods of applications.
fn pods(watch: &Watch) -> Box<dyn Iterator<Item = Source> + '_> {
    let source = |((namespace, name), pod): (store::Key, kept::Pod)| {
        let deployment = watch.namespaces.get("", &namespace)?.deployment;
        Some(Source {
            key: ("Pod", namespace, name),
            mark: mark((pod.mark(), deployment.as_str())),
            row: Box::new(move || {
                let mut row = pod.row()?;
                row["deploymentId"] = deployment.as_str().into();
                Some(row)
            }),
        })
    };
    Box::new(watch.pods.all().into_iter().filter_map(source))
}

fn deployments(watch: &Watch) -> Box<dyn Iterator<Item = Source> + '_> {
    let source = |((namespace, name), kept): (store::Key, kept::Deployment)| Source {
        key: ("StyrminDeployment", namespace, name),
        mark: kept.mark(),
        row: Box::new(move || Some(rows::deployment(&kept.object()?))),
    };
    Box::new(watch.deployments.all().into_iter().map(source))
}

fn flux_statuses(watch: &Watch) -> Box<dyn Iterator<Item = Source> + '_> {
    let source = |kind: &'static str| {
        move |(name, kept): (Box<str>, kept::Flux)| Source {
            key: (kind, FLUX_NAMESPACE.into(), name),
            mark: kept.mark(),
            row: Box::new(move || Some(rows::flux_status(kind, &kept.object()?))),
        }
    };
    let git = watch.git_repositories.within(FLUX_NAMESPACE).into_iter().map(source("GitRepository"));
    let kustomizations = watch.kustomizations.within(FLUX_NAMESPACE).into_iter().map(source("Kustomization"));
    Box::new(git.chain(kustomizations))
}
