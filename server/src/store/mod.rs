//! Everything that Styrmin remembers.
//!
//! This file has the rows and the trait; `sqlite` and `postgres` implement it with one text of SQL
//! (`sql.rs`, compiled for each), and one conformance suite (`tests/e2e/store.rs`) runs on both.
//! What must never enter: decisions. A caller computes outside and commits here, inside one short
//! transaction that verifies the versions it computed from; a version that moved is
//! [`StoreError::Conflict`], and the caller computes again.
//!
//! Times are milliseconds since the Unix epoch ([`Millis`]). "Not found" is `None`.

mod postgres;
mod sqlite;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::sync::Arc;
use styrmin_renderer::config::{Level, Object};
use styrmin_renderer::spec::StyrminDeploymentSpec;

/// Milliseconds since the Unix epoch.
pub type Millis = i64;

/// Why the store did not do it.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// A row that the caller computed from has changed meanwhile: compute again.
    #[error("the row changed meanwhile")]
    Conflict,
    /// A unique name or place is taken.
    #[error("it exists already")]
    Exists,
    /// Another process writes to the repositories now.
    #[error("another server writes to the repositories now")]
    Fenced,
    /// The database failed.
    #[error("database: {0}")]
    Database(#[from] sqlx::Error),
    /// The schema could not be brought up to date.
    #[error("database migration: {0}")]
    Migration(#[from] sqlx::migrate::MigrateError),
}

/// Result of the store.
pub type Result<T> = std::result::Result<T, StoreError>;

macro_rules! text_enum {
    ($(#[$meta:meta])* $name:ident { $($(#[$vmeta:meta])* $variant:ident = $text:literal),+ $(,)? }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, async_graphql::Enum)]
        pub enum $name { $($(#[$vmeta])* $variant),+ }
        impl $name {
            /// As stored.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $text),+ }
            }
        }
        impl TryFrom<String> for $name {
            type Error = String;
            fn try_from(text: String) -> std::result::Result<Self, String> {
                match text.as_str() { $($text => Ok(Self::$variant),)+ other => Err(format!("unknown {}: {other}", stringify!($name))) }
            }
        }
    };
}

mod review;

pub use review::{
    Delivery, DeliveryRules, ForgeAddress, ForgeKind, ItemState, MergeMethod, MergedItem, Proposal, ProposalEnd,
    ProposalItem, ProposalScope, ProposalState, ProposedChange, ProposedDriver, ProposedEdit, ProposedPatch,
    PushedItem, Rest, ReviewStore, StatusDue,
};

text_enum! {
    /// Whose token it is.
    TokenKind {
        /// A person who may do everything.
        Administrator = "administrator",
        /// The agent of one cluster, for that cluster only.
        Agent = "agent",
    }
}

text_enum! {
    /// What a deployment should be doing.
    Lifecycle {
        /// Runs.
        Running = "running",
        /// Kept, without pods.
        Stopped = "stopped",
        /// Being removed, or gone.
        Deleting = "deleting",
    }
}

text_enum! {
    /// Where the newest change of a deployment is.
    DeploymentState {
        /// Accepted, not yet in Git.
        Pending = "pending",
        /// In Git, on its way.
        Deploying = "deploying",
        /// The newest instance runs.
        Running = "running",
        /// The newest instance is stopped as wished.
        Stopped = "stopped",
        /// The newest change failed.
        Failed = "failed",
        /// A restore is running.
        Restoring = "restoring",
        /// The removal is on its way.
        Deleting = "deleting",
        /// Gone.
        Deleted = "deleted",
    }
}

text_enum! {
    /// Where an instance is.
    InstanceState {
        /// Accepted, not yet in Git.
        Pending = "pending",
        /// In Git.
        Committed = "committed",
        /// It runs.
        Active = "active",
        /// It ran, and a newer one took its place.
        Retired = "retired",
        /// A newer one took its place before it ran.
        Superseded = "superseded",
        /// It could not be made to run.
        Failed = "failed",
        /// In review.
        Proposed = "proposed",
        /// Reviewed, and not wanted.
        Rejected = "rejected",
    }
}

text_enum! {
    /// Result of a task.
    TaskState {
        /// On its way.
        Running = "running",
        /// Done.
        Succeeded = "succeeded",
        /// Given up, with a message.
        Failed = "failed",
        /// A newer change took its place.
        Superseded = "superseded",
        /// Its proposal was closed without a merge.
        Rejected = "rejected",
    }
}

text_enum! {
    /// State of a step.
    StepState {
        /// Not begun.
        Pending = "pending",
        /// Begun.
        Running = "running",
        /// Done.
        Succeeded = "succeeded",
        /// Failed, with a message.
        Failed = "failed",
        /// Not needed any more.
        Skipped = "skipped",
    }
}

text_enum! {
    /// What happened to a deployment.
    TimelineKind {
        /// Somebody asked for a change.
        Asked = "asked",
        /// The change came into the repository.
        Committed = "committed",
        /// The change ended, well or not, or a newer one was kept in its place.
        Ended = "ended",
        /// The operator came to another phase.
        Phase = "phase",
        /// The operator put something back.
        Drift = "drift",
        /// Somebody changed its files in the repository.
        Edited = "edited",
        /// Something happened to a request that people review.
        Review = "review",
    }
}

text_enum! {
    /// What the server does about what people change in a cluster's repository.
    EditPolicy {
        /// What a deployment's configuration can say becomes a change of the deployment; anything else is put
        /// back.
        Adopt = "adopt",
        /// Everything is put back.
        Restore = "restore",
        /// It stays as it is until somebody decides.
        Hold = "hold",
    }
}

text_enum! {
    /// What somebody did to a file of ours.
    EditKind {
        /// Other content of a deployment.
        Changed = "changed",
        /// The content of an earlier instance.
        Reverted = "reverted",
        /// A deployment's file is gone.
        Removed = "removed",
        /// The file of a deployment that was removed is there again.
        Returned = "returned",
        /// A deployment's file lies somewhere else.
        Moved = "moved",
        /// A deployment's file is empty.
        Emptied = "emptied",
        /// A deployment's file cannot be read, or is another object.
        Broken = "broken",
        /// Another secrets file.
        Secrets = "secrets",
        /// A file of an environment, a driver or a chart.
        Other = "other",
        /// The branch does not lead on from where it was.
        Rewound = "rewound",
    }
}

text_enum! {
    /// What became of an edit.
    EditState {
        /// It runs as Flux applied it, and changes of its deployment wait until somebody decides.
        Held = "held",
        /// A removal that waits for somebody to confirm it; the application runs on.
        Waiting = "waiting",
        /// It became a change of the deployment.
        Adopted = "adopted",
        /// It is being put back.
        Restoring = "restoring",
        /// It was put back.
        Restored = "restored",
        /// Something newer took its place.
        Superseded = "superseded",
        /// There is nothing to do about it.
        Noted = "noted",
    }
}

text_enum! {
    /// Whose configuration changed.
    FanOutLevel {
        /// A cluster's.
        Cluster = "cluster",
        /// An environment's.
        Environment = "environment",
    }
}

text_enum! {
    /// Where a fan-out is.
    FanOutState {
        /// Deployments are still looked at.
        Running = "running",
        /// Every deployment was looked at; what changes goes on as tasks.
        Finished = "finished",
    }
}

text_enum! {
    /// What an outbox row asks for. The writer renders it from the database when it writes.
    OutboxKind {
        /// The skeleton of a cluster's repository.
        Cluster = "cluster",
        /// Namespace and shards of an environment.
        Environment = "environment",
        /// One instance, or the absence of its deployment.
        Instance = "instance",
        /// What was there before somebody's edit.
        Restore = "restore",
        /// The chart and release of a cluster's agent.
        Agent = "agent",
    }
}

text_enum! {
    /// What is known about a commit of ours.
    BatchState {
        /// Made, perhaps pushed.
        Prepared = "prepared",
        /// Not found in the remote when last looked; a late push may still bring it.
        Abandoned = "abandoned",
    }
}

text_enum! {
    /// What a report is a whole snapshot of.
    Snapshot {
        /// Pods.
        Pods = "pods",
        /// StyrminDeployments.
        Deployments = "deployments",
        /// Flux's GitRepositories and Kustomizations.
        Flux = "flux",
    }
}

/// A person, as the author of a change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Person {
    /// Name.
    pub name: String,
    /// Email.
    pub email: String,
}

/// An API token. Its text is not stored.
#[derive(Debug, Clone, PartialEq, sqlx::FromRow)]
pub struct Token {
    /// Id.
    pub id: String,
    /// SHA-256 of the text, hexadecimal.
    pub hash: String,
    /// Whose it is.
    #[sqlx(try_from = "String")]
    pub kind: TokenKind,
    /// Name of the person or agent.
    pub name: String,
    /// Email of the person.
    pub email: String,
    /// The agent's cluster.
    pub cluster_id: Option<String>,
    /// When it was made.
    pub created_at: Millis,
    /// When it was revoked.
    pub revoked_at: Option<Millis>,
}

/// A cluster.
#[derive(Debug, Clone, PartialEq, sqlx::FromRow)]
pub struct Cluster {
    /// Id.
    pub id: String,
    /// Unique name.
    pub name: String,
    /// Configuration of this level.
    #[sqlx(json)]
    pub config: Object,
    /// Counts changes of the row.
    pub version: i64,
    /// Where its repository is; `None`: hosted by this server.
    pub git_url: Option<String>,
    /// The repository, however its URL is spelled: one writer for each and branch.
    pub repository: String,
    /// Branch that Flux follows.
    pub branch: String,
    /// Folder of the cluster in the repository; empty for the root.
    pub path: String,
    /// Encrypted credentials for `git_url`.
    pub credentials: Option<Vec<u8>>,
    /// age recipients that secrets of this cluster are encrypted for.
    #[sqlx(json)]
    pub age_recipients: Vec<String>,
    /// What is done about people's edits.
    #[sqlx(try_from = "String")]
    pub edit_policy: EditPolicy,
    /// How many removals at once are taken over without asking.
    pub removal_threshold: i64,
    /// Public keys of others whose commits Flux accepts beside ours; `None`: it accepts every commit.
    #[sqlx(json(nullable))]
    pub trusted_keys: Option<Vec<String>>,
    /// How changes are delivered.
    #[sqlx(json)]
    pub delivery: DeliveryRules,
    /// The forge of its repository.
    #[sqlx(json(nullable))]
    pub forge: Option<ForgeAddress>,
    /// Encrypted secrets for the forge.
    pub forge_secrets: Option<Vec<u8>>,
    /// When it was made.
    pub created_at: Millis,
}

/// An environment.
#[derive(Debug, Clone, PartialEq, sqlx::FromRow)]
pub struct Environment {
    /// Id.
    pub id: String,
    /// Its cluster, for ever.
    pub cluster_id: String,
    /// Unique within the cluster.
    pub name: String,
    /// Configuration of this level.
    #[sqlx(json)]
    pub config: Object,
    /// Counts changes of the row.
    pub version: i64,
    /// Deployments ever created in it.
    pub allocated: i64,
    /// How changes are delivered, where it differs from the cluster.
    #[sqlx(json)]
    pub delivery: DeliveryRules,
    /// When it was made.
    pub created_at: Millis,
}

impl Environment {
    /// Number of its shards.
    #[must_use]
    pub fn shards(&self) -> u32 {
        let size = i64::from(styrmin_renderer::layout::SHARD_SIZE);
        u32::try_from((self.allocated - 1).max(0) / size + 1).unwrap_or(u32::MAX)
    }
}

/// A deployment: desired state.
#[derive(Debug, Clone, PartialEq, sqlx::FromRow)]
pub struct Deployment {
    /// Id.
    pub id: String,
    /// Its environment, for ever.
    pub environment_id: String,
    /// Unique within the environment among those not being deleted.
    pub name: String,
    /// Shard, for ever.
    pub shard: i64,
    /// Driver.
    pub driver_name: String,
    /// Driver version, by content.
    pub driver_digest: String,
    /// Driver version that a person insists on.
    pub driver_pin: Option<String>,
    /// Version of the application.
    pub application_version: String,
    /// Configuration of this level.
    #[sqlx(json)]
    pub config: Object,
    /// Parameters, the secret ones excepted.
    #[sqlx(json)]
    pub parameters: Object,
    /// What it should be doing.
    #[sqlx(try_from = "String")]
    pub lifecycle: Lifecycle,
    /// Where its newest change is.
    #[sqlx(try_from = "String")]
    pub state: DeploymentState,
    /// Counts changes of the row.
    pub version: i64,
    /// Sequence of the newest instance.
    pub last_sequence: i64,
    /// The newest instance.
    pub newest_instance_id: Option<String>,
    /// The instance that runs.
    pub active_instance_id: Option<String>,
    /// When it was made.
    pub created_at: Millis,
}

/// A secret parameter, encrypted.
#[derive(Debug, Clone, PartialEq, sqlx::FromRow)]
pub struct Secret {
    /// Its deployment.
    pub deployment_id: String,
    /// The parameter.
    pub name: String,
    /// The value, encrypted with the server's key.
    pub ciphertext: Vec<u8>,
    /// Keyed hash of the value.
    pub fingerprint: String,
}

/// An immutable snapshot of the resolved configuration, with its rendered bytes.
#[derive(Debug, Clone, PartialEq, sqlx::FromRow)]
pub struct Instance {
    /// UUID.
    pub id: String,
    /// Its deployment.
    pub deployment_id: String,
    /// 1 for the first of the deployment.
    pub sequence: i64,
    /// create, update, upgrade or delete.
    pub workflow: String,
    /// The spec; for a delete that of the instance before.
    #[sqlx(json)]
    pub spec: StyrminDeploymentSpec,
    /// JSON pointer below /config and /parameters → level.
    #[sqlx(json)]
    pub origins: BTreeMap<String, Level>,
    /// `styrmindeployment.yaml`; `None` for a delete.
    pub document: Option<String>,
    /// `secrets.sops.yaml`.
    pub secrets_file: Option<String>,
    /// What `secrets_file` was made from: fingerprints and recipients. Equal stamp, same file.
    pub secrets_stamp: Option<String>,
    /// What the deployment itself said, for a rollback.
    #[sqlx(json(nullable))]
    pub sources: Option<Sources>,
    /// Where it is.
    #[sqlx(try_from = "String")]
    pub state: InstanceState,
    /// Commit that brought it to the repository.
    pub revision: Option<String>,
    /// Its task.
    pub task_id: String,
    /// Who changed.
    pub author_name: String,
    /// Who changed.
    pub author_email: String,
    /// When.
    pub created_at: Millis,
}

/// What a deployment's row and secrets said when an instance was made. Driver, application version and
/// lifecycle are in its spec.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Sources {
    /// Configuration of the deployment's level.
    pub config: Object,
    /// Parameters, the secret ones excepted.
    pub parameters: Object,
    /// Driver version that a person insisted on.
    pub driver_pin: Option<String>,
    /// Secret parameters, by name.
    pub secrets: BTreeMap<String, Sealed>,
}

/// An encrypted value.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sealed {
    /// The value, encrypted with the server's key, as base64.
    pub ciphertext: String,
    /// Keyed hash of the value.
    pub fingerprint: String,
}

/// One change on its way.
#[derive(Debug, Clone, PartialEq, sqlx::FromRow)]
pub struct Task {
    /// UUID.
    pub id: String,
    /// Its deployment.
    pub deployment_id: String,
    /// Its instance.
    pub instance_id: String,
    /// The instance's sequence.
    pub sequence: i64,
    /// create, update, upgrade or delete.
    pub workflow: String,
    /// Result.
    #[sqlx(try_from = "String")]
    pub state: TaskState,
    /// For people.
    pub message: Option<String>,
    /// Who changed.
    pub author_name: String,
    /// Who changed.
    pub author_email: String,
    /// Counts changes of the task and its steps.
    pub version: i64,
    /// When it was accepted.
    pub created_at: Millis,
    /// When it ended.
    pub ended_at: Option<Millis>,
    /// The fan-out that it is part of.
    pub fan_out_id: Option<String>,
    /// In order.
    #[sqlx(skip)]
    pub steps: Vec<Step>,
}

/// One step of a task.
#[derive(Debug, Clone, PartialEq, sqlx::FromRow)]
pub struct Step {
    /// Its task.
    pub task_id: String,
    /// 0 for the first.
    pub position: i64,
    /// For people.
    pub name: String,
    /// State.
    #[sqlx(try_from = "String")]
    pub state: StepState,
    /// 1 for the first.
    pub attempt: i64,
    /// For people.
    pub message: Option<String>,
    /// When it began.
    pub started_at: Option<Millis>,
    /// When it ended.
    pub ended_at: Option<Millis>,
}

/// A changed configuration on its way to every deployment that takes values from it. The deployments that it
/// changes are its tasks.
#[derive(Debug, Clone, PartialEq, sqlx::FromRow)]
pub struct FanOut {
    /// UUID.
    pub id: String,
    /// Whose configuration changed.
    #[sqlx(try_from = "String")]
    pub level: FanOutLevel,
    /// Id of the cluster or environment.
    pub subject_id: String,
    /// The cluster.
    pub cluster_id: String,
    /// Where it is.
    #[sqlx(try_from = "String")]
    pub state: FanOutState,
    /// What it left as it is; empty while it runs.
    #[sqlx(json)]
    pub untouched: Untouched,
    /// Who changed the configuration.
    pub author_name: String,
    /// Who changed the configuration.
    pub author_email: String,
    /// When.
    pub created_at: Millis,
    /// When every deployment had been looked at.
    pub ended_at: Option<Millis>,
    /// The proposal that gets what it finds.
    pub proposal_id: Option<String>,
}

/// Deployments that a fan-out left as they are, by id.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Untouched {
    /// They have what is said now, or it is on its way.
    pub unchanged: Vec<String>,
    /// With the reason why nothing was tried.
    pub skipped: Vec<(String, String)>,
    /// With what kept them from it.
    pub failed: Vec<(String, String)>,
}

/// A deployment, and as much of its newest instance as tells whether a configuration changes it.
#[derive(Debug, Clone, PartialEq, sqlx::FromRow)]
pub struct Concerned {
    /// The deployment.
    #[sqlx(flatten)]
    pub deployment: Deployment,
    /// State of its newest instance.
    pub newest_state: Option<String>,
    /// Digest of what that asks for.
    pub content_digest: Option<String>,
    /// What its secrets file was made from.
    pub secrets_stamp: Option<String>,
}

/// Title of the observation that an application is being torn down: its removal has a reason.
pub const TEARDOWN: &str = "Teardown";

/// Something that a report showed of a deployment beside its tasks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Observation {
    /// UUID.
    pub id: String,
    /// The deployment.
    pub deployment_id: String,
    /// When, by this server's clock.
    pub at: Millis,
    /// Phase or drift.
    pub kind: TimelineKind,
    /// In a word.
    pub title: String,
    /// In a sentence.
    pub message: Option<String>,
}

/// One entry of a deployment's timeline.
#[derive(Debug, Clone, PartialEq, Eq, sqlx::FromRow)]
pub struct TimelineEntry {
    /// When.
    pub at: Millis,
    /// Orders entries of one moment: asked, committed, observed, ended.
    pub key: String,
    /// What happened.
    #[sqlx(try_from = "String")]
    pub kind: TimelineKind,
    /// In a word: the workflow, the commit, the task's state, the phase.
    pub title: String,
    /// In a sentence.
    pub message: Option<String>,
    /// The task that it is about.
    pub task_id: Option<String>,
}

/// What somebody changed in a cluster's repository, and what became of it.
#[derive(Debug, Clone, PartialEq, Eq, sqlx::FromRow)]
pub struct GitEdit {
    /// UUID.
    pub id: String,
    /// The cluster.
    pub cluster_id: String,
    /// The deployment whose file it is.
    pub deployment_id: Option<String>,
    /// The file, in the repository; empty for the branch as a whole.
    pub path: String,
    /// What was done.
    #[sqlx(try_from = "String")]
    pub kind: EditKind,
    /// What became of it.
    #[sqlx(try_from = "String")]
    pub state: EditState,
    /// The commit that made it.
    pub commit_id: String,
    /// The commit's author.
    pub author_name: String,
    /// The commit's author.
    pub author_email: String,
    /// From which commit to which the branch was read when it was found: `<commit>..<commit>`.
    pub reading: String,
    /// What the file holds since; `None`: it is gone, or no text.
    pub content: Option<String>,
    /// What it means and what follows, for people.
    pub message: Option<String>,
    /// The task that took it over.
    pub task_id: Option<String>,
    /// When it was found.
    pub created_at: Millis,
    /// When it was clear what becomes of it.
    pub decided_at: Option<Millis>,
    /// Who found it, as long as that is not stored: it may be only while it leads.
    #[sqlx(skip)]
    pub lead: Option<Lead>,
}

impl GitEdit {
    /// The commit's author.
    #[must_use]
    pub fn author(&self) -> Person {
        Person { name: self.author_name.clone(), email: self.author_email.clone() }
    }
}

/// Which edits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EditScope<'a> {
    /// Of one cluster.
    Cluster(&'a str),
    /// Of one deployment.
    Deployment(&'a str),
    /// Those of one cluster that are held or wait.
    Open(&'a str),
}

/// Which tasks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TaskScope<'a> {
    /// All.
    All,
    /// Of one deployment.
    Deployment(&'a str),
    /// Of one fan-out.
    FanOut(&'a str),
}

/// Something that must reach a repository.
#[derive(Debug, Clone, PartialEq, sqlx::FromRow)]
pub struct OutboxRow {
    /// Order of acceptance; given by the store.
    pub id: i64,
    /// The repository.
    pub repository: String,
    /// The branch.
    pub branch: String,
    /// What it asks for.
    #[sqlx(try_from = "String")]
    pub kind: OutboxKind,
    /// Id of the cluster, environment or instance.
    pub subject_id: String,
    /// Who asked.
    pub author_name: String,
    /// Who asked.
    pub author_email: String,
    /// When.
    pub created_at: Millis,
}

/// A repository and branch: what has one writer.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, sqlx::FromRow)]
pub struct Target {
    /// The repository.
    pub repository: String,
    /// The branch.
    pub branch: String,
}

/// The right of one process to write to the repositories. What is stored under an older one is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lead {
    /// The process.
    pub holder: String,
    /// Counts how often it went to another process.
    pub epoch: i64,
}

/// What happened in the database by whatever process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Notice {
    /// Something waits for this repository.
    Waits(Target),
    /// This branch was pushed to, or read.
    Moved(Target),
    /// Somebody may have pushed here.
    Look(Target),
}

/// A commit that was made and perhaps pushed.
#[derive(Debug, Clone, PartialEq, sqlx::FromRow)]
pub struct Batch {
    /// The commit.
    pub commit_id: String,
    /// The repository.
    pub repository: String,
    /// The branch.
    pub branch: String,
    /// Tip that it was made on; `None`: the branch did not exist.
    pub base: Option<String>,
    /// What it does.
    #[sqlx(json)]
    pub rows: BatchRows,
    /// What is known about it.
    #[sqlx(try_from = "String")]
    pub state: BatchState,
    /// When it was made.
    pub created_at: Millis,
}

/// What a commit does, by id.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchRows {
    /// Outbox rows that it answers.
    pub outbox: Vec<i64>,
    /// Instances that it names.
    pub instances: Vec<String>,
    /// Instances that it leaves out for newer ones.
    pub superseded: Vec<String>,
    /// Edits that it puts back.
    #[serde(default)]
    pub restored: Vec<String>,
}

/// A driver version, by content.
#[derive(Debug, Clone, PartialEq, sqlx::FromRow)]
pub struct DriverVersion {
    /// Digest of the files.
    pub digest: String,
    /// Driver.
    pub name: String,
    /// Version.
    pub version: String,
    /// The files.
    #[sqlx(json)]
    pub files: BTreeMap<String, String>,
    /// When it was loaded.
    pub loaded_at: Millis,
}

/// An instance and what the writer must know about its place.
#[derive(Debug, Clone, PartialEq, sqlx::FromRow)]
pub struct InstanceToWrite {
    /// The instance.
    #[sqlx(flatten)]
    pub instance: Instance,
    /// Environment of its deployment.
    pub environment_id: String,
    /// Cluster of its deployment.
    pub cluster_id: String,
    /// Shard of its deployment.
    pub shard: i64,
    /// Name of its deployment.
    pub deployment_name: String,
    /// Newest sequence of its deployment: a file with a higher one is not ours.
    pub last_sequence: i64,
    /// Whether an instance of its deployment is known to have reached the repository.
    pub written: bool,
}

/// Which instance of which deployment, without its content.
#[derive(Debug, Clone, PartialEq, Eq, sqlx::FromRow)]
pub struct InstancePlace {
    /// Id of the instance.
    pub id: String,
    /// Its deployment.
    pub deployment_id: String,
    /// Its sequence.
    pub sequence: i64,
    /// Newest sequence of the deployment.
    pub last_sequence: i64,
}

/// A change of one deployment: all of it is stored, or nothing.
#[derive(Debug, Clone)]
pub struct Change {
    /// Version of the cluster that it was computed from.
    pub cluster: (String, i64),
    /// Version of the environment that it was computed from.
    pub environment: (String, i64),
    /// The row as it shall be. `version` is the one it was computed from, 0 for a new deployment;
    /// the store counts it up, and gives a new deployment its shard.
    pub deployment: Deployment,
    /// Secrets to write.
    pub set_secrets: Vec<Secret>,
    /// Secrets to remove.
    pub remove_secrets: Vec<String>,
    /// The new instance with its task, when something changes for the cluster.
    pub instance: Option<(Instance, Task)>,
    /// Where it must be written.
    pub target: Target,
    /// The fan-out that it is part of: it is not written before that has ended.
    pub fan_out: Option<String>,
    /// The edit of the repository that it takes over.
    pub edit: Option<GitEdit>,
    /// The part of a proposal that it takes over.
    pub merged: Option<MergedItem>,
    /// Who changes.
    pub author: Person,
    /// When.
    pub now: Millis,
}

/// The repository now holds what some rows ask for.
#[derive(Debug, Clone)]
pub struct Pushed {
    /// The commit that brought it; `None` when none was needed.
    pub batch: Option<String>,
    /// The repository.
    pub target: Target,
    /// Revision that holds it; `None` when the repository is empty.
    pub revision: Option<String>,
    /// The rows.
    pub rows: BatchRows,
    /// Tasks as they are now, computed by the task state machine; `version` as read.
    pub tasks: Vec<Task>,
    /// Who says so.
    pub lead: Lead,
}

/// The last report that was accepted from a cluster's agent.
#[derive(Debug, Clone, PartialEq, Eq, sqlx::FromRow)]
pub struct LastReport {
    /// Its cluster.
    pub cluster_id: String,
    /// UID of the cluster's kube-system namespace, bound at the first report.
    pub cluster_uid: String,
    /// Who reported: one agent process.
    pub identity: String,
    /// Transition count of the agents' lease.
    pub epoch: i64,
    /// Counts the reports of one agent process, of every kind.
    pub sequence: i64,
    /// When, of any kind.
    pub reported_at: Millis,
    /// When pods were last reported.
    pub pods_at: Option<Millis>,
    /// Digest of that snapshot.
    pub pods_digest: Option<String>,
    /// When StyrminDeployments were last reported.
    pub deployments_at: Option<Millis>,
    /// Digest of that snapshot.
    pub deployments_digest: Option<String>,
    /// When Flux's objects were last reported.
    pub flux_at: Option<Millis>,
    /// Digest of that snapshot.
    pub flux_digest: Option<String>,
}

/// What a cluster's agent says of itself, and of what no snapshot shows.
#[derive(Debug, Clone, PartialEq, Eq, sqlx::FromRow)]
pub struct ClusterFacts {
    /// Its cluster.
    pub cluster_id: String,
    /// Transition count of the agents' lease.
    pub epoch: i64,
    /// What it says.
    #[sqlx(json)]
    pub facts: AgentFacts,
    /// How much later its clock was than ours when this arrived, in milliseconds.
    pub skew_ms: i64,
    /// When.
    pub said_at: Millis,
}

/// See [`ClusterFacts`].
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AgentFacts {
    /// Its version.
    pub version: String,
    /// Whether the kind StyrminDeployment in the cluster is the one that it knows: CURRENT, OTHER or MISSING.
    pub kind: String,
    /// Kinds whose objects it could not list yet: nothing is done or reported until it can.
    pub waits_for: Vec<String>,
}

/// The agent's release in a cluster's repository.
#[derive(Debug, Clone, PartialEq, sqlx::FromRow)]
pub struct AgentRelease {
    /// Its cluster.
    pub cluster_id: String,
    /// Version of the chart: that of the server which wrote it.
    pub version: String,
    /// Values of the chart.
    #[sqlx(json)]
    pub values: Object,
    /// When.
    pub released_at: Millis,
}

/// One object as last reported.
#[derive(Debug, Clone, PartialEq, Eq, sqlx::FromRow)]
pub struct StatusRow {
    /// Its cluster.
    pub cluster_id: String,
    /// The snapshot that it is part of.
    #[sqlx(try_from = "String")]
    pub snapshot: Snapshot,
    /// Kind of the object.
    pub kind: String,
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// The deployment of this cluster that it belongs to.
    pub deployment_id: Option<String>,
    /// UID of a StyrminDeployment; empty for others.
    pub uid: String,
    /// A StyrminDeployment that is being deleted.
    pub deleting: bool,
    /// Digest of `content`.
    pub digest: String,
    /// As reported, as JSON.
    pub content: String,
    /// When `content` last changed.
    pub updated_at: Millis,
}

/// Which object: kind, namespace, name.
pub type StatusKey = (String, String, String);

/// Which rows of what agents said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StatusScope<'a> {
    /// Of every cluster.
    All,
    /// Of one cluster.
    Cluster(&'a str),
    /// Of one deployment.
    Deployment(&'a str),
}

/// Where a list of statuses goes on: cluster, kind, namespace and name of the last row seen.
pub type AfterStatus = Option<[String; 4]>;

/// A deployment of a cluster, as far as a report needs to know.
#[derive(Debug, Clone, PartialEq, Eq, sqlx::FromRow)]
pub struct DeploymentPlace {
    /// Id.
    pub id: String,
    /// Its environment.
    pub environment_id: String,
    /// What it should be doing.
    #[sqlx(try_from = "String")]
    pub lifecycle: Lifecycle,
    /// Where its newest change is.
    #[sqlx(try_from = "String")]
    pub state: DeploymentState,
    /// The newest instance.
    pub newest_instance_id: Option<String>,
}

/// A running task and what a report must know about its deployment.
#[derive(Debug, Clone, PartialEq, sqlx::FromRow)]
pub struct RunningTask {
    /// The task with its steps.
    #[sqlx(flatten)]
    pub task: Task,
    /// Environment of its deployment.
    pub environment_id: String,
    /// Shard of its deployment.
    pub shard: i64,
    /// What its deployment should be doing.
    #[sqlx(try_from = "String")]
    pub lifecycle: Lifecycle,
    /// Where the deployment's newest change is.
    #[sqlx(try_from = "String")]
    pub deployment_state: DeploymentState,
    /// The deployment's newest instance.
    pub newest_instance_id: Option<String>,
    /// Commit that brought the task's instance to the repository.
    pub revision: Option<String>,
}

/// What a report makes of an instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InstanceOutcome {
    /// It runs; the one that ran before is retired, older ones that never ran are superseded.
    Active {
        /// The instance.
        id: String,
        /// Its sequence.
        sequence: i64,
    },
    /// It could not be made to run, or stopped running.
    Failed {
        /// The instance.
        id: String,
    },
    /// The deployment is gone, and with it the instance that ran.
    Gone,
}

/// What a report makes of a deployment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeploymentOutcome {
    /// The deployment.
    pub deployment_id: String,
    /// Its newest instance when this was computed; another one now is [`StoreError::Conflict`].
    pub newest_instance_id: Option<String>,
    /// Its new state; `None`: as it is.
    pub state: Option<DeploymentState>,
    /// What became of an instance.
    pub instance: Option<InstanceOutcome>,
}

/// A report and all that follows from it: all of it is stored, or nothing.
#[derive(Debug, Clone)]
pub struct Report {
    /// Epoch and sequence of the last report when this was computed; `None`: this is the first.
    pub last: Option<(i64, i64)>,
    /// The row as it shall be.
    pub row: LastReport,
    /// The snapshot that it is.
    pub snapshot: Snapshot,
    /// Objects that are new or differ.
    pub set: Vec<StatusRow>,
    /// Objects that vanished.
    pub remove: Vec<StatusKey>,
    /// Deployments that moved, by id.
    pub deployments: Vec<DeploymentOutcome>,
    /// Tasks that moved, computed by the task state machine; `version` as read.
    pub tasks: Vec<Task>,
    /// What else it shows.
    pub observations: Vec<Observation>,
}

/// What the answer to a report says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Confirmations {
    /// The newest commit that is known in the cluster's repository and branch.
    pub newest_revision: Option<String>,
    /// Id and UID of the StyrminDeployments that are being deleted because somebody asked for it.
    pub deletions: Vec<(String, String)>,
}

/// Where a list goes on: name and id of the last row seen.
pub type After = Option<(String, String)>;

/// What Styrmin remembers.
#[async_trait]
pub trait Store: ReviewStore {
    /// Answers when the database does.
    async fn ping(&self) -> Result<()>;

    /// The token with this hash, unless revoked.
    async fn token(&self, hash: &str) -> Result<Option<Token>>;
    /// Adds a token.
    async fn insert_token(&self, token: &Token) -> Result<()>;
    /// Adds a token of a cluster's agent in place of all that it had.
    async fn replace_agent_token(&self, token: &Token) -> Result<()>;
    /// Whether an administrator's token was ever made.
    async fn has_administrator(&self) -> Result<bool>;

    /// Adds a cluster, its agent's token and the request for its skeleton.
    async fn insert_cluster(&self, cluster: &Cluster, agent: &Token, author: &Person) -> Result<()>;
    /// Replaces configuration, recipient and policies of a cluster whose version is still that of the row, and begins
    /// the fan-out.
    async fn update_cluster(&self, cluster: &Cluster, fan_out: &FanOut) -> Result<()>;
    /// One cluster by id or name.
    async fn cluster(&self, id_or_name: &str) -> Result<Option<Cluster>>;
    /// For which age recipients a cluster can decrypt, as its agent last said.
    async fn recipients(&self, cluster: &str) -> Result<Option<Vec<String>>>;
    /// Stores that.
    async fn set_recipients(&self, cluster: &str, recipients: &[String], now: Millis) -> Result<()>;
    /// What the agent of a cluster said of itself last.
    async fn facts(&self, cluster: &str) -> Result<Option<ClusterFacts>>;
    /// Stores that, unless an agent of a later epoch said something.
    async fn set_facts(&self, facts: &ClusterFacts) -> Result<()>;
    /// The agent's release in a cluster's repository.
    async fn agent_release(&self, cluster: &str) -> Result<Option<AgentRelease>>;
    /// Stores that, and the request for its files.
    async fn set_agent_release(&self, release: &AgentRelease, target: &Target, author: &Person) -> Result<()>;
    /// Clusters whose files are in this repository and branch, oldest first.
    async fn clusters_in(&self, target: &Target) -> Result<Vec<Cluster>>;
    /// Clusters by name.
    async fn clusters(&self, after: After, limit: i64) -> Result<Vec<Cluster>>;

    /// Adds an environment and the request for its files.
    async fn insert_environment(&self, environment: &Environment, target: &Target, author: &Person) -> Result<()>;
    /// Replaces the configuration of an environment whose version is still that of the row, and begins the
    /// fan-out.
    async fn update_environment(&self, environment: &Environment, fan_out: &FanOut) -> Result<()>;
    /// One environment by id.
    async fn environment(&self, id: &str) -> Result<Option<Environment>>;
    /// Environments by name, of one cluster or all.
    async fn environments(&self, cluster: Option<&str>, after: After, limit: i64) -> Result<Vec<Environment>>;

    /// Fan-outs that have not ended, oldest first.
    async fn running_fan_outs(&self) -> Result<Vec<FanOut>>;
    /// One fan-out by id.
    async fn fan_out(&self, id: &str) -> Result<Option<FanOut>>;
    /// Fan-outs of a cluster or environment, newest first, older than an id.
    async fn fan_outs(&self, subject: &str, before: Option<&str>, limit: i64) -> Result<Vec<FanOut>>;
    /// The deployments that a fan-out concerns, those that are gone excepted, in one statement.
    async fn concerned(&self, fan_out: &FanOut) -> Result<Vec<Concerned>>;
    /// Deployment, name and fingerprint of every secret of these deployments, in one statement.
    async fn concerned_secrets(&self, fan_out: &FanOut) -> Result<Vec<(String, String, String)>>;
    /// Tasks of a fan-out by their state.
    async fn fan_out_progress(&self, id: &str) -> Result<Vec<(String, i64)>>;
    /// Deployments that a fan-out has changed.
    async fn fan_out_deployments(&self, id: &str) -> Result<Vec<String>>;
    /// Newest tasks of all deployments that a fan-out concerns by their state, those being deleted excepted.
    async fn newest_tasks(&self, fan_out: &FanOut) -> Result<Vec<(String, i64)>>;
    /// Every deployment was looked at: what it changed may be written, unless something newer took its place.
    async fn finish_fan_out(&self, id: &str, untouched: &Untouched, now: Millis) -> Result<()>;

    /// Stores a change; gives back the row as stored. One of a fan-out that has ended is [`StoreError::Conflict`].
    async fn change(&self, change: &Change) -> Result<Deployment>;
    /// Stores changes of existing deployments in one transaction; `false` for each that was computed from
    /// rows that have moved, and of which nothing is stored. All are of one fan-out, which has not ended:
    /// otherwise [`StoreError::Conflict`].
    async fn change_all(&self, changes: &[Change]) -> Result<Vec<bool>>;
    /// One deployment by id.
    async fn deployment(&self, id: &str) -> Result<Option<Deployment>>;
    /// Deployments by name, of one environment, one cluster or all.
    async fn deployments(
        &self,
        cluster: Option<&str>,
        environment: Option<&str>,
        after: After,
        limit: i64,
    ) -> Result<Vec<Deployment>>;
    /// Secrets of a deployment.
    async fn secrets(&self, deployment: &str) -> Result<Vec<Secret>>;

    /// One instance by id.
    async fn instance(&self, id: &str) -> Result<Option<Instance>>;
    /// Instances of a deployment, newest first, below a sequence.
    async fn instances(&self, deployment: &str, before: Option<i64>, limit: i64) -> Result<Vec<Instance>>;
    /// One task with its steps.
    async fn task(&self, id: &str) -> Result<Option<Task>>;
    /// Tasks, newest first, older than an id.
    async fn tasks(&self, scope: TaskScope<'_>, before: Option<&str>, limit: i64) -> Result<Vec<Task>>;

    /// What happened to a deployment, newest first, before the entry of that moment and key.
    async fn timeline(
        &self,
        deployment: &str,
        before: Option<(Millis, String)>,
        limit: i64,
    ) -> Result<Vec<TimelineEntry>>;
    /// Removes what ended before `before`: tasks with their instances, unless they are among the newest `keep` of
    /// their deployment, run or are wanted; fan-outs; observations. At most `limit` of each; gives how many
    /// there were.
    async fn forget(&self, before: Millis, keep: i64, limit: i64) -> Result<usize>;

    /// How far the branch was read: the last commit that is known with all it holds, and how often it was read.
    async fn head(&self, target: &Target) -> Result<Option<(String, i64)>>;
    /// The branch was read up to this commit, by who leads.
    async fn set_head(&self, target: &Target, commit: &str, lead: &Lead) -> Result<()>;
    /// The newest instance of a deployment that is in the repository.
    async fn committed_instance(&self, deployment: &str) -> Result<Option<Instance>>;
    /// Stores edits as they are now, with what follows: those to put back get an outbox row, held ones keep back
    /// the changes of their deployment, earlier open ones of the same file end. One that was found before and is not
    /// open any more is [`StoreError::Conflict`].
    async fn record_edits(&self, edits: &[GitEdit], target: &Target, author: &Person) -> Result<()>;
    /// Ends the open edits of files that are as we wrote them again.
    async fn close_edits(&self, cluster: &str, paths: &[String], now: Millis, lead: Option<&Lead>) -> Result<()>;
    /// One edit by id.
    async fn edit(&self, id: &str) -> Result<Option<GitEdit>>;
    /// Edits, newest first, older than an id.
    async fn edits(&self, scope: EditScope<'_>, before: Option<&str>, limit: i64) -> Result<Vec<GitEdit>>;
    /// The newest edit of a deployment that is held.
    async fn held_edit(&self, deployment: &str) -> Result<Option<GitEdit>>;
    /// The newest edit of a file that was taken over by a change that is not in the repository yet.
    async fn adopted_edit(&self, cluster: &str, path: &str) -> Result<Option<GitEdit>>;
    /// Files of a cluster that were found in a reading.
    async fn edits_of(&self, cluster: &str, reading: &str) -> Result<Vec<String>>;
    /// Removals that wait although their teardown was seen, and then a snapshot without the object: somebody
    /// confirmed them there.
    async fn confirmed_removals(&self, target: &Target) -> Result<Vec<GitEdit>>;

    /// Repositories of clusters, and those with something to write or to find out.
    async fn targets(&self) -> Result<Vec<Target>>;
    /// Waiting rows of one repository, oldest first; without those of fan-outs that have not ended.
    async fn outbox(&self, target: &Target, limit: i64) -> Result<Vec<OutboxRow>>;
    /// Number of waiting rows.
    async fn outbox_size(&self) -> Result<i64>;
    /// Where the instances of the oldest waiting rows belong, in one statement.
    async fn waiting_instances(&self, target: &Target, limit: i64) -> Result<Vec<InstancePlace>>;
    /// Where these instances belong.
    async fn instance_places(&self, ids: &[String]) -> Result<Vec<InstancePlace>>;
    /// Instances with their content and places.
    async fn instances_to_write(&self, ids: &[String]) -> Result<Vec<InstanceToWrite>>;
    /// Running tasks of the deployment, up to and including a sequence, with their steps.
    async fn running_tasks(&self, deployment: &str, up_to: i64) -> Result<Vec<Task>>;
    /// Writes why the first unfinished step of these tasks waits.
    async fn explain_waiting(&self, instances: &[String], message: &str) -> Result<()>;
    /// Takes or keeps the right to write to the repositories for `limit` milliseconds; `None`: another process has
    /// it.
    async fn lead(&self, holder: &str, limit: Millis) -> Result<Option<Lead>>;
    /// Gives it back.
    async fn resign(&self, lead: &Lead) -> Result<()>;
    /// Hears what other processes store, for as long as the future is awaited. An embedded database has none.
    async fn hear(&self, tell: tokio::sync::mpsc::Sender<Notice>);
    /// Tells the other processes.
    async fn tell(&self, notice: &Notice) -> Result<()>;
    /// Records a commit before its push, by who leads.
    async fn prepare_batch(&self, batch: &Batch, lead: &Lead) -> Result<()>;
    /// Commits of one repository that may still turn up.
    async fn open_batches(&self, target: &Target) -> Result<Vec<Batch>>;
    /// The commit is not in the remote's history. Of its rows only the instances stay: should it turn
    /// up later, it says what they became, and the rest is found waiting and planned again.
    async fn abandon_batch(&self, batch: &Batch, lead: &Lead) -> Result<()>;
    /// The repository holds what the rows ask for: they leave the outbox, their tasks move on.
    async fn finish_batch(&self, pushed: &Pushed) -> Result<()>;

    /// The last report of a cluster's agent.
    async fn last_report(&self, cluster: &str) -> Result<Option<LastReport>>;
    /// The last report of the agent of a deployment's cluster.
    async fn last_report_of(&self, deployment: &str) -> Result<Option<LastReport>>;
    /// Running tasks of a cluster with their steps, in two statements.
    async fn running_in(&self, cluster: &str) -> Result<Vec<RunningTask>>;
    /// StyrminDeployments of a cluster's running tasks, as last reported.
    async fn running_statuses(&self, cluster: &str) -> Result<Vec<StatusRow>>;
    /// One deployment of a cluster.
    async fn deployment_place(&self, cluster: &str, id: &str) -> Result<Option<DeploymentPlace>>;
    /// All deployments of a cluster.
    async fn deployment_places(&self, cluster: &str) -> Result<Vec<DeploymentPlace>>;
    /// Digests of everything that was last reported in a snapshot of a cluster.
    async fn status_digests(&self, cluster: &str, snapshot: Snapshot) -> Result<Vec<(StatusKey, String)>>;
    /// What was reported, by cluster, kind, namespace and name.
    async fn statuses(
        &self,
        snapshot: Snapshot,
        scope: StatusScope<'_>,
        after: AfterStatus,
        limit: i64,
    ) -> Result<Vec<StatusRow>>;
    /// Stores a report and what follows from it. A report, deployment or task that moved meanwhile
    /// is [`StoreError::Conflict`].
    async fn record_report(&self, report: &Report) -> Result<()>;
    /// What the answer to a report of a cluster says.
    async fn confirmations(&self, cluster: &str) -> Result<Confirmations>;

    /// Adds a driver version. The same content again is nothing; other content under the same
    /// version is [`StoreError::Exists`].
    async fn insert_driver(&self, driver: &DriverVersion) -> Result<()>;
    /// All driver versions, oldest first.
    async fn drivers(&self) -> Result<Vec<DriverVersion>>;
}

/// Opens the database of `url` and brings its schema up to date: `sqlite:PATH` or `postgres://…`.
///
/// # Errors
/// When it cannot be reached or migrated, or the URL is of another kind.
pub async fn open(url: &str) -> Result<Arc<dyn Store>> {
    if url.starts_with("postgres://") || url.starts_with("postgresql://") {
        return Ok(Arc::new(postgres::open(url).await?));
    }
    Ok(Arc::new(sqlite::open(url).await?))
}

/// Copies an SQLite database into a file that does not exist, as it is at one moment, while others use it.
///
/// # Errors
/// When it cannot be read, or the file cannot be written.
pub async fn copy_sqlite(url: &str, to: &std::path::Path) -> Result<()> {
    sqlite::copy(url, to).await
}
