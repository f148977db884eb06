//! The way to the server, and what its answers said last.

use crate::clock;
use crate::settings::Settings;
use crate::snapshot::Message;
use anyhow::Context as _;
use serde_json::{Value, json};
use std::collections::{BTreeSet, HashMap};
use std::path::PathBuf;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use styrmin_client::{Client, ClientError};
use styrmin_renderer::canonical;
use tokio::sync::watch;

/// The report that nothing differs. Short, since most are this one.
pub const UNCHANGED: &str = "mutation($e:Int!,$s:Int!,$d:String!){report:reportUnchanged(epoch:$e,sequence:$s,digest:$d){newestRevision confirmedDeletions{deploymentId uid}}}";

/// Asks for the newest commit, which the server answers when there is one.
const NEWEST: &str = "query($after:String){newestRevision(after:$after)}";

/// Says what the cluster can decrypt.
const RECIPIENTS: &str = "mutation($identity:String!,$epoch:Int!,$recipients:[String!]!){reportRecipients(identity:$identity,epoch:$epoch,recipients:$recipients)}";

/// Says what this agent is.
const FACTS: &str = "mutation($epoch:Int!,$facts:FactsInput!){reportFacts(epoch:$epoch,facts:$facts)}";

/// What an agent says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    /// Its version.
    pub version: String,
    /// Whether the cluster has our kind as this agent knows it: CURRENT, OTHER or MISSING.
    pub kind: String,
    /// Kinds that it could not list yet.
    pub waits_for: Vec<String>,
    /// UID of the namespace kube-system.
    pub cluster_uid: String,
}

/// What the server's answers said last.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Answer {
    /// The newest commit that Styrmin pushed to this cluster's branch.
    pub newest_revision: Option<String>,
    /// Deployments whose application may be torn down, with the UID of the object that was meant.
    pub confirmed_deletions: HashMap<String, String>,
}

/// The server.
pub struct Server {
    address: String,
    token: Option<String>,
    token_file: Option<PathBuf>,
    identity: String,
    epoch: i32,
    sequence: AtomicI64,
    answer: watch::Sender<Arc<Answer>>,
    /// The last connection, with the token that it is for: each new one reads all authorities again.
    connection: Mutex<Option<(String, Client)>>,
}

impl Server {
    /// A connection as configured; `epoch` is the lease's.
    ///
    /// # Errors
    /// When there is no token.
    pub fn new(settings: &Settings, identity: String, epoch: i32) -> anyhow::Result<Self> {
        anyhow::ensure!(
            settings.token.is_some() || settings.token_file.is_some(),
            "no token: set STYRMIN_AGENT_TOKEN or STYRMIN_AGENT_TOKEN_FILE to the token that the server gave for this cluster"
        );
        Ok(Self {
            address: settings.server_address.clone(),
            token: settings.token.clone(),
            token_file: settings.token_file.clone(),
            identity,
            epoch,
            sequence: AtomicI64::new(0),
            answer: watch::Sender::default(),
            connection: Mutex::default(),
        })
    }

    /// What the last answer said.
    #[must_use]
    pub fn answer(&self) -> Arc<Answer> {
        Arc::clone(&self.answer.borrow())
    }

    /// Is told of every answer.
    #[must_use]
    pub fn answers(&self) -> watch::Receiver<Arc<Answer>> {
        self.answer.subscribe()
    }

    async fn client(&self) -> anyhow::Result<Client> {
        let token = match (&self.token, &self.token_file) {
            (Some(token), _) => token.clone(),
            (None, Some(path)) => {
                let text = tokio::fs::read_to_string(path).await;
                text.with_context(|| format!("the token's file {}", path.display()))?.trim().to_owned()
            }
            (None, None) => String::new(),
        };
        let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, known)) = connection.as_ref().filter(|(of, _)| *of == token) {
            return Ok(known.clone());
        }
        let client = Client::new(&self.address, &token)?;
        *connection = Some((token, client.clone()));
        Ok(client)
    }

    fn next(&self) -> i64 {
        self.sequence.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Sends one report; `mutation` takes `$agent`, `$items`, `$digest` and `$delta`. Gives whether other
    /// deletions are confirmed than before.
    ///
    /// # Errors
    /// When the server cannot be reached or refuses.
    pub async fn report(&self, mutation: &str, cluster: &str, message: Message) -> anyhow::Result<bool> {
        let agent =
            json!({ "identity": self.identity, "epoch": self.epoch, "sequence": self.next(), "clusterUid": cluster });
        let variables = json!({ "agent": agent, "digest": message.digest, "delta": message.delta }).to_string();
        // The items follow as the text that they are.
        let rest = variables.strip_suffix('}').unwrap_or_default();
        let head = format!("{{\"query\":{},\"variables\":{rest},\"items\":", Value::from(mutation));
        let pieces = std::iter::once(head).chain(message.text()).chain(std::iter::once("}}".to_owned()));
        self.ask(pieces).await
    }

    /// Says that nothing differs from the snapshots of pods, StyrminDeployments and Flux with these digests.
    /// Gives whether other deletions are confirmed than before.
    ///
    /// # Errors
    /// When the server cannot be reached or refuses, or has others.
    pub async fn unchanged(&self, cluster: &str, digests: [&str; 3]) -> anyhow::Result<bool> {
        let [pods, deployments, flux] = digests;
        let digest = canonical::digest_parts([self.identity.as_str(), cluster, pods, deployments, flux]);
        let variables = json!({ "e": self.epoch, "s": self.next(), "d": digest });
        self.ask([json!({ "query": UNCHANGED, "variables": variables }).to_string()].into_iter()).await
    }

    /// Says for which age recipients the cluster can decrypt.
    ///
    /// # Errors
    /// When the server cannot be reached or refuses: it has to have had a report of this process before.
    pub async fn recipients(&self, recipients: &BTreeSet<String>) -> anyhow::Result<()> {
        let variables = json!({ "identity": self.identity, "epoch": self.epoch, "recipients": recipients });
        self.client().await?.execute(RECIPIENTS, variables).await?;
        Ok(())
    }

    /// Says what this agent is, with its time.
    ///
    /// # Errors
    /// When the server cannot be reached or refuses.
    pub async fn facts(&self, facts: &Facts) -> anyhow::Result<()> {
        let Facts { version, kind, waits_for, cluster_uid } = facts;
        let sent_at = clock::now().to_string();
        let facts = json!({ "version": version, "kind": kind, "waitsFor": waits_for, "sentAt": sent_at, "clusterUid": cluster_uid });
        self.client().await?.execute(FACTS, json!({ "epoch": self.epoch, "facts": facts })).await?;
        Ok(())
    }

    async fn ask(&self, body: impl Iterator<Item = String> + Send + Sync + 'static) -> anyhow::Result<bool> {
        let data = self.client().await?.execute_pieces(body).await?;
        let answer = &data["report"];
        let confirmed = answer["confirmedDeletions"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|one| Some((one["deploymentId"].as_str()?.to_owned(), one["uid"].as_str()?.to_owned())));
        let answer = Answer {
            newest_revision: answer["newestRevision"].as_str().map(str::to_owned),
            confirmed_deletions: confirmed.collect(),
        };
        let before = self.answer.send_replace(Arc::new(answer));
        Ok(before.confirmed_deletions != self.answer().confirmed_deletions)
    }

    /// Waits until the server has pushed another commit than the one that is known, for half a minute at most;
    /// it is in [`Self::answer`] then.
    ///
    /// # Errors
    /// When the server cannot be reached or refuses.
    pub async fn next_revision(&self) -> anyhow::Result<()> {
        let after = self.answer().newest_revision.clone();
        let data = self.client().await?.execute(NEWEST, json!({ "after": after })).await?;
        let newest = data["newestRevision"].as_str();
        self.answer.send_if_modified(|answer| {
            // A report was answered meanwhile: that is as new, or newer.
            let is_news = newest.is_some() && newest != after.as_deref() && answer.newest_revision == after;
            if is_news {
                let newest_revision = newest.map(str::to_owned);
                *answer = Arc::new(Answer { newest_revision, ..Answer::clone(answer) });
            }
            is_news
        });
        Ok(())
    }
}

/// Whether the server has another snapshot than the one that a report differs from.
#[must_use]
pub fn wants_the_whole(error: &anyhow::Error) -> bool {
    is_refused(error, "WHOLE_NEEDED")
}

/// Whether the server refused because another agent reports for this cluster.
#[must_use]
pub fn is_stale(error: &anyhow::Error) -> bool {
    is_refused(error, "STALE_REPORT")
}

fn is_refused(error: &anyhow::Error, with: &str) -> bool {
    matches!(error.downcast_ref(), Some(ClientError::Refused { code: Some(code), .. }) if code == with)
}
