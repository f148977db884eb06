//! One agent leads: a Lease in the cluster, renewed by its holder.
//!
//! The lease's count of transitions is the agent's epoch: it grows whenever another process takes
//! over, and the server refuses reports of an older one.

use crate::settings::Settings;
use crate::{NAMESPACE, clock};
use anyhow::Context as _;
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease as LeaseObject, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::api::{Api, ObjectMeta, PostParams};
use kube::{Client, Error};
use std::time::Duration;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

const NAME: &str = "styrmin-agent";
/// Where the counts of transitions begin, in seconds since the Unix epoch.
const EPOCHS_BEGIN: i64 = 1_700_000_000;
/// How long one request may take.
const REQUEST_LIMIT: Duration = Duration::from_secs(10);

/// The lease, held.
pub struct Lease {
    /// Grows with every holder.
    pub epoch: i32,
    /// Cancelled when the lease is lost. Nothing may be written after that.
    pub lost: CancellationToken,
    renewing: JoinHandle<()>,
    api: Api<LeaseObject>,
    identity: String,
}

/// A name for this process: the one that was configured or the host's, and a part that no other process
/// has. Two processes of one name would take the lease for their own.
#[must_use]
pub fn identity(configured: Option<&str>) -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let name = configured.unwrap_or(host.trim());
    let name = if name.is_empty() { "agent" } else { name };
    format!("{name}-{:x}-{:x}", std::process::id(), clock::now().as_microsecond())
}

/// Waits for the lease; `None` when `stop` came first.
///
/// # Errors
/// When the API server refuses, for example because rights are missing.
pub async fn acquire(
    client: &Client,
    identity: &str,
    settings: &Settings,
    stop: &CancellationToken,
) -> anyhow::Result<Option<Lease>> {
    let api: Api<LeaseObject> = Api::namespaced(client.clone(), NAMESPACE);
    let duration = i32::try_from(settings.lease_duration)?;
    let pause = Duration::from_secs(u64::from(settings.lease_duration)) / 5;
    // By this clock, not by the holder's: how long its renewal has not changed.
    let mut seen: Option<(MicroTime, Instant)> = None;
    let mut told = false;
    loop {
        let attempted = tokio::time::timeout(REQUEST_LIMIT, attempt(&api, identity, duration, &mut seen)).await;
        match attempted {
            Err(_) => warn!(
                "the API server did not answer within {} s whether Lease {NAMESPACE}/{NAME} is free; trying again",
                REQUEST_LIMIT.as_secs()
            ),
            Ok(Ok(Some(held))) => {
                let epoch = held.spec.as_ref().and_then(|spec| spec.lease_transitions).unwrap_or_default();
                let lost = CancellationToken::new();
                let renewing = tokio::spawn(renew(api.clone(), held, duration, pause, lost.clone()));
                return Ok(Some(Lease { epoch, lost, renewing, api, identity: identity.to_owned() }));
            }
            Ok(Ok(None)) if !told => {
                info!("another agent holds Lease {NAMESPACE}/{NAME}; waiting for it to go");
                told = true;
            }
            Ok(Ok(None)) => {}
            Ok(Err(Error::Api(status))) if status.code == 403 || status.code == 404 => {
                return Err(Error::Api(status)).with_context(|| {
                    format!("Lease {NAMESPACE}/{NAME}: the agent's ClusterRole and the namespace {NAMESPACE} have to be there")
                });
            }
            Ok(Err(error)) => warn!(%error, "Lease {NAMESPACE}/{NAME} cannot be read or written; trying again"),
        }
        tokio::select! {
            () = stop.cancelled() => return Ok(None),
            () = tokio::time::sleep(pause) => {}
        }
    }
}

/// Takes the lease when nobody holds it; `None` when somebody does.
async fn attempt(
    api: &Api<LeaseObject>,
    identity: &str,
    duration: i32,
    seen: &mut Option<(MicroTime, Instant)>,
) -> Result<Option<LeaseObject>, Error> {
    let now = clock::now();
    // A count that grows by itself: with the lease deleted, the server would take a small one for an older
    // agent's.
    let first = i32::try_from(now.as_second() - EPOCHS_BEGIN).unwrap_or(1);
    let Some(mut lease) = api.get_opt(NAME).await? else {
        let metadata = ObjectMeta { name: Some(NAME.into()), ..ObjectMeta::default() };
        let lease = LeaseObject { metadata, spec: Some(spec(identity, duration, first, now)) };
        return taken(api.create(&PostParams::default(), &lease).await);
    };
    let held = lease.spec.clone().unwrap_or_default();
    let free = held.holder_identity.as_deref().unwrap_or_default().is_empty();
    if !free {
        let renewed = held.renew_time.unwrap_or(MicroTime(Timestamp::UNIX_EPOCH));
        let since = match seen {
            Some((known, since)) if known.0 == renewed.0 => *since,
            _ => Instant::now(),
        };
        *seen = Some((renewed, since));
        let limit = u64::try_from(held.lease_duration_seconds.unwrap_or(duration)).unwrap_or_default();
        if since.elapsed() <= Duration::from_secs(limit) {
            return Ok(None);
        }
    }
    let transitions = held.lease_transitions.unwrap_or_default().saturating_add(1).max(first);
    lease.spec = Some(spec(identity, duration, transitions, now));
    taken(api.replace(NAME, &PostParams::default(), &lease).await)
}

/// Somebody else was faster: that is no error.
fn taken(answer: Result<LeaseObject, Error>) -> Result<Option<LeaseObject>, Error> {
    match answer {
        Ok(lease) => Ok(Some(lease)),
        Err(Error::Api(status)) if status.code == 409 => Ok(None),
        Err(error) => Err(error),
    }
}

fn spec(identity: &str, duration: i32, transitions: i32, now: Timestamp) -> LeaseSpec {
    LeaseSpec {
        holder_identity: Some(identity.to_owned()),
        lease_duration_seconds: Some(duration),
        acquire_time: Some(MicroTime(now)),
        renew_time: Some(MicroTime(now)),
        lease_transitions: Some(transitions),
        ..LeaseSpec::default()
    }
}

/// Renews until it cannot. It gives up a little before another process may take over.
async fn renew(api: Api<LeaseObject>, mut held: LeaseObject, duration: i32, pause: Duration, lost: CancellationToken) {
    let limit = Duration::from_secs(u64::try_from(duration).unwrap_or_default()).mul_f64(0.8);
    let mut renewed = Instant::now();
    loop {
        tokio::select! {
            () = lost.cancelled() => return,
            () = tokio::time::sleep(pause) => {}
        }
        let began = Instant::now();
        if let Some(spec) = &mut held.spec {
            spec.renew_time = Some(MicroTime(clock::now()));
        }
        let left = limit.saturating_sub(renewed.elapsed());
        let parameters = PostParams::default();
        match tokio::time::timeout(left, api.replace(NAME, &parameters, &held)).await {
            Ok(Ok(lease)) => {
                held = lease;
                renewed = began;
                continue;
            }
            Ok(Err(Error::Api(status))) if status.code == 409 || status.code == 404 => {
                // Perhaps our own renewal, whose answer was lost, or somebody's annotation.
                let left = limit.saturating_sub(renewed.elapsed());
                let found = tokio::time::timeout(left, api.get_opt(NAME)).await;
                match found {
                    Ok(Ok(Some(found))) if holder(&found) == holder(&held) => {
                        held = found;
                        continue;
                    }
                    Ok(Ok(_)) => {
                        warn!("the lease was taken by another agent");
                        break;
                    }
                    _ => {}
                }
            }
            Ok(Err(error)) => warn!(%error, "the lease cannot be renewed; trying again"),
            Err(_) => {}
        }
        if renewed.elapsed() >= limit {
            warn!("the lease could not be renewed in time");
            break;
        }
    }
    lost.cancel();
}

/// Who holds a lease, for which time.
fn holder(lease: &LeaseObject) -> Option<(&str, i32)> {
    let spec = lease.spec.as_ref()?;
    Some((spec.holder_identity.as_deref()?, spec.lease_transitions?))
}

impl Lease {
    /// Ends renewing; with `free` the lease is given back at once, so that the next agent need not wait.
    pub async fn release(self, free: bool) {
        self.lost.cancel();
        // A renewal that is under way may wait for its answer; what it changes is read anew below.
        let renewing = self.renewing.abort_handle();
        if tokio::time::timeout(Duration::from_secs(2), self.renewing).await.is_err() {
            renewing.abort();
        }
        if !free {
            return;
        }
        let given_back = async {
            let mut lease = self.api.get(NAME).await?;
            let spec = lease.spec.get_or_insert_default();
            if spec.holder_identity.as_deref() == Some(self.identity.as_str()) {
                spec.holder_identity = None;
                self.api.replace(NAME, &PostParams::default(), &lease).await?;
            }
            Ok::<(), Error>(())
        };
        if let Err(error) = tokio::time::timeout(Duration::from_secs(5), given_back).await.unwrap_or(Ok(())) {
            warn!(%error, "the lease could not be given back; the next agent waits until it runs out");
        }
    }
}
