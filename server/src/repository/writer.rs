//! One task per repository and branch: takes what waits, commits it, pushes it, records it.
//!
//! A round that fails leaves everything as it was; the next one begins with what the remote's
//! history says. So a kill at any point costs one round and nothing else.

use super::access::Access;
use super::git::GitError;
use super::message::{Entry, Message, Restored};
use super::mirror::Mirror;
use super::sign::Signer;
use super::splice::{Edit, Edits, Signature, Stamp};
use super::{Beside, Host, People, Pushes, Wake, template};
use crate::clock::Clock;
use crate::drivers::Drivers;
use crate::secrets::{ServerKey, credentials_place};
use crate::store::{
    Batch, BatchRows, BatchState, Cluster, EditState, GitEdit, Instance, InstancePlace, InstanceToWrite, Lead, Millis,
    Notice, OutboxKind, OutboxRow, Person, Pushed, Store, StoreError, Target, Task,
};
use crate::tasks::machine::{self, Event};
use crate::{faults, metrics};
use anyhow::Context as _;
use git2::Oid;
use std::collections::btree_map::Entry as Slot;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use styrmin_renderer::canonical;
use styrmin_renderer::driver::Driver;
use styrmin_renderer::names::{DeploymentId, EnvironmentId};
use styrmin_renderer::spec::{self, Committed};
use styrmin_renderer::{diff, layout, objects, yaml};
use tokio::sync::{Notify, Semaphore, mpsc};
use tokio::task::{JoinSet, spawn_blocking};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use tracing::{Instrument as _, error, info, info_span, warn};

/// How long rounds that are under way may take when the server stops, or another one takes over.
const ENDING: Duration = Duration::from_secs(15);
/// How long packing a repository may take.
const TIDY_LIMIT: Duration = Duration::from_secs(1800);
/// How long, in milliseconds, a lead lasts without a word from who has it.
const LEAD: Millis = 10_000;
/// How often it is kept.
const KEEP: Duration = Duration::from_secs(3);
/// Notices of other replicas that may wait to be looked at.
const NOTICES: usize = 1_000;
/// Repositories that are looked at at the same time although nothing waits for them.
static LOOKING: Semaphore = Semaphore::const_new(8);
/// How the repositories of this server are called.
const EMBEDDED: &str = "embedded:";
/// Most outbox rows of one commit.
const BATCH_MAX: i64 = 20_000;
/// Up to how many instances of one commit its message says what differs.
const DESCRIBED_MAX: usize = 50;
/// Longest time to gather changes between two commits.
const GATHER_MAX: Duration = Duration::from_millis(500);
/// An idle writer gathers what comes together with the change that woke it: until nothing came for this long.
const QUIET: Duration = Duration::from_millis(50);
/// And no longer than this.
const QUIET_MAX: Duration = Duration::from_millis(300);
/// How often writers look although nobody woke them.
const LOOK: Duration = Duration::from_secs(30);
/// After how many moved tips in a row a writer pauses: then it is not people who are in the way.
const MOVED_MAX: u32 = 20;
/// How often the end of a batch is computed again when a task moved meanwhile.
const FINISH_ATTEMPTS: u32 = 10;

/// Settings of the writers.
#[derive(Debug, Clone)]
pub struct WriterSettings {
    /// Folder for the copies of the repositories.
    pub mirrors: PathBuf,
    /// URL of this server, as clusters reach it.
    pub public_url: String,
    /// Time limit of one Git command.
    pub git_limit: Duration,
    /// How often a repository elsewhere is looked at although nobody told of a push.
    pub poll: Duration,
    /// From how many objects on, each in a file of its own, a repository is packed.
    pub loose_objects: usize,
    /// First pause after a failed round; it doubles.
    pub retry_first: Duration,
    /// Longest pause after failed rounds.
    pub retry_most: Duration,
    /// Committer of every commit, and author of those of several people.
    pub committer: Signature,
}

/// All writers of this server.
pub struct Writers {
    /// What waits, and what is known.
    pub store: Arc<dyn Store>,
    /// Driver versions by digest.
    pub drivers: Arc<Drivers>,
    /// Opens the Git credentials.
    pub key: Arc<ServerKey>,
    /// Signs commits.
    pub signer: Arc<Signer>,
    /// Time.
    pub clock: Arc<dyn Clock>,
    /// Repositories of this server.
    pub host: Host,
    /// Notices of new rows.
    pub wake: Wake,
    /// Told of every push.
    pub pushes: Pushes,
    /// Told what others commit.
    pub people: Arc<dyn People>,
    /// Works beside the writers while this process leads.
    pub beside: Arc<dyn Beside>,
    /// Settings.
    pub settings: WriterSettings,
}

/// Wakes one writer.
#[derive(Default)]
struct Bell {
    notify: Notify,
    /// Somebody may have pushed.
    look: AtomicBool,
}

impl Bell {
    fn ring(&self, look: bool) {
        self.look.fetch_or(look, Ordering::Relaxed);
        self.notify.notify_one();
    }

    /// A burst shares one commit, and a single change hardly waits.
    async fn until_quiet(&self) {
        let end = tokio::time::Instant::now() + QUIET_MAX;
        while tokio::time::Instant::now() < end {
            if tokio::time::timeout(QUIET, self.notify.notified()).await.is_err() {
                return;
            }
        }
    }
}

impl Writers {
    /// Writes while this process leads, until `stop`. Of several replicas one does; when it dies, another takes over
    /// once its lead has run out, and what the dead one stored last counts no more if it comes late.
    pub async fn run(self: Arc<Self>, stop: CancellationToken) {
        let holder = uuid::Uuid::now_v7().to_string();
        let hearing = AbortOnDropHandle::new(tokio::spawn(Arc::clone(&self).hear()));
        loop {
            match self.store.lead(&holder, LEAD).await {
                Ok(Some(lead)) => {
                    info!(epoch = lead.epoch, "this server writes to the repositories");
                    let lost = stop.child_token();
                    let keeping = tokio::spawn(Arc::clone(&self).keep(lead.clone(), lost.clone()));
                    let keeping = AbortOnDropHandle::new(keeping);
                    let beside = Arc::clone(&self.beside).run(lead.clone(), lost.clone());
                    let beside = AbortOnDropHandle::new(tokio::spawn(beside));
                    Arc::clone(&self).write(&lead, lost).await;
                    drop((keeping, beside));
                    if stop.is_cancelled() {
                        if let Err(error) = self.store.resign(&lead).await {
                            warn!(%error, "another server has to wait until it may write");
                        }
                        break;
                    }
                    warn!("another server writes to the repositories now, or the database did not answer");
                }
                Ok(None) => {}
                Err(error) => error!(%error, "the database does not say who writes to the repositories"),
            }
            tokio::select! {
                () = stop.cancelled() => break,
                () = tokio::time::sleep(KEEP) => {}
            }
        }
        drop(hearing);
    }

    /// Keeps the lead; without it, ends what writes.
    async fn keep(self: Arc<Self>, lead: Lead, lost: CancellationToken) {
        let mut kept = tokio::time::Instant::now();
        loop {
            tokio::time::sleep(KEEP).await;
            match self.store.lead(&lead.holder, LEAD).await {
                Ok(Some(now)) if now == lead => kept = tokio::time::Instant::now(),
                Err(_) if kept.elapsed() < Duration::from_millis(LEAD.unsigned_abs()) => {}
                _ => break lost.cancel(),
            }
        }
    }

    /// Hears what other replicas stored.
    async fn hear(self: Arc<Self>) {
        let (tell, mut told) = mpsc::channel(NOTICES);
        let heard = async {
            while let Some(notice) = told.recv().await {
                let (Notice::Waits(target) | Notice::Look(target) | Notice::Moved(target)) = &notice;
                self.wake.review(target);
                match notice {
                    Notice::Waits(target) => self.wake.target(&target),
                    Notice::Look(target) => self.wake.look(&target),
                    Notice::Moved(target) => self.pushes.tell(&target),
                }
            }
        };
        tokio::join!(self.store.hear(tell), heard);
    }

    /// Runs a writer for each repository, until `stop`.
    async fn write(self: Arc<Self>, lead: &Lead, stop: CancellationToken) {
        let mut writers: HashMap<Target, Arc<Bell>> = HashMap::new();
        let mut tasks = JoinSet::new();
        loop {
            match self.store.targets().await {
                Ok(targets) => {
                    for target in targets {
                        writers.entry(target.clone()).or_insert_with(|| {
                            let bell = Arc::new(Bell::default());
                            let writer = Writer {
                                span: info_span!("repository", repository = target.repository, branch = target.branch),
                                target,
                                shared: Arc::clone(&self),
                                mirror: None,
                                tip: None,
                                moved: 0,
                                gather: None,
                                bell: Arc::clone(&bell),
                                stop: stop.clone(),
                                lead: lead.clone(),
                                // It was never looked at, so its first round does.
                                look: false,
                                poll: self.settings.poll.mul_f64(0.75 + rand::random::<f64>() / 2.0),
                                looked: None,
                                asked: None,
                            };
                            let span = writer.span.clone();
                            tasks.spawn(writer.run().instrument(span));
                            bell
                        });
                    }
                }
                Err(error) => error!(%error, "the repository writers cannot read what waits"),
            }
            // Every known writer looks at its own rows; only new repositories need the list.
            loop {
                let woken = tokio::select! {
                    () = stop.cancelled() => {
                        // What is cut off then is found in the history, by whoever goes on.
                        let ended = async { while tasks.join_next().await.is_some() {} };
                        let _ = tokio::time::timeout(ENDING, ended).await;
                        return;
                    }
                    targets = self.wake.take() => targets,
                    () = tokio::time::sleep(LOOK) => break,
                };
                let mut unknown = false;
                for (target, look) in woken {
                    match writers.get(&target) {
                        Some(bell) => bell.ring(look),
                        None => unknown = true,
                    }
                }
                if unknown {
                    break;
                }
            }
        }
    }
}

/// How a round ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    /// Nothing waits.
    Idle,
    /// Something happened: look again at once.
    Again,
}

/// Why a round failed.
#[derive(Debug, thiserror::Error)]
enum RoundError {
    #[error(transparent)]
    Git(#[from] GitError),
    #[error("database: {0}")]
    Store(#[from] StoreError),
    #[error("the copy of the repository: {0}")]
    Objects(#[from] git2::Error),
    #[error("{0:#}")]
    Other(#[from] anyhow::Error),
}

impl RoundError {
    fn cause(&self) -> &'static str {
        match self {
            Self::Git(error) => error.cause(),
            Self::Store(_) => "database",
            Self::Objects(_) => "objects",
            Self::Other(_) => "other",
        }
    }
}

type Result<T> = std::result::Result<T, RoundError>;

struct Writer {
    span: tracing::Span,
    target: Target,
    shared: Arc<Writers>,
    mirror: Option<Mirror>,
    /// The tip as the last round left it. A stale one costs a rejected push, nothing more.
    tip: Option<Option<Oid>>,
    /// Rounds in a row whose push met a moved tip.
    moved: u32,
    /// How long to gather changes before the next round: as long as the last push took.
    gather: Option<Duration>,
    bell: Arc<Bell>,
    stop: CancellationToken,
    /// Under which it stores what it does.
    lead: Lead,
    /// Somebody may have committed something that was not read yet.
    look: bool,
    /// How often to look although nobody told: not all at the same moment.
    poll: Duration,
    /// When the branch was last looked at for what others committed.
    looked: Option<tokio::time::Instant>,
    /// When what waits for somebody was last looked at.
    asked: Option<tokio::time::Instant>,
}

/// What one commit shall do.
#[derive(Default)]
struct Work {
    edits: Edits,
    message: Message,
    /// Authors of rows that are no instances.
    authors: Vec<Person>,
    rows: BatchRows,
    /// Rows whose wish the repository fulfils already.
    quiet: BatchRows,
    /// A commit is needed even when it changes no file.
    anyway: bool,
}

impl Writer {
    async fn run(mut self) {
        let (bell, stop) = (Arc::clone(&self.bell), self.stop.clone());
        let mut pause = self.shared.settings.retry_first;
        loop {
            let wait = match self.round().await {
                Ok(Outcome::Again) => {
                    pause = self.shared.settings.retry_first;
                    if let Some(gather) = self.gather.take() {
                        // Under a steady stream of changes half of the time goes to gathering, so
                        // that they share commits; a single change finds the writer idle.
                        self.tip = None;
                        tokio::select! {
                            () = stop.cancelled() => {}
                            () = tokio::time::sleep(gather) => {}
                        }
                    }
                    if stop.is_cancelled() {
                        return;
                    }
                    continue;
                }
                Ok(Outcome::Idle) => {
                    pause = self.shared.settings.retry_first;
                    tokio::select! {
                        () = stop.cancelled() => return,
                        () = bell.notify.notified() => bell.until_quiet().await,
                        () = tokio::time::sleep(LOOK) => self.tip = None,
                    }
                    continue;
                }
                Err(error) => {
                    self.tip = None;
                    // Opened anew, it removes locks that an ended git left.
                    self.mirror = None;
                    metrics::push_failed(error.cause());
                    let wait = pause;
                    pause = (pause * 2).min(self.shared.settings.retry_most);
                    warn!(
                        error = error.to_string(),
                        retry_in_ms = wait.as_millis() as u64,
                        "changes wait for the repository"
                    );
                    if !matches!(error, RoundError::Store(StoreError::Fenced)) {
                        self.explain(&error, wait).await;
                    }
                    wait
                }
            };
            // New rows do not shorten the pause: a repository that is down is not asked more often.
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(wait) => {}
            }
        }
    }

    /// Says on every waiting task why it waits.
    async fn explain(&self, error: &RoundError, wait: Duration) {
        let message = format!("Waiting for the repository: {error}; trying again in {} s", wait.as_secs().max(1));
        let waiting = async {
            let rows = self.shared.store.outbox(&self.target, BATCH_MAX).await?;
            let instances: Vec<String> =
                rows.into_iter().filter(|row| row.kind == OutboxKind::Instance).map(|row| row.subject_id).collect();
            self.shared.store.explain_waiting(&instances, &message).await
        };
        if let Err(error) = waiting.await {
            error!(%error, "tasks cannot be told why they wait");
        }
    }

    async fn round(&mut self) -> Result<Outcome> {
        let store = Arc::clone(&self.shared.store);
        let rows = store.outbox(&self.target, BATCH_MAX).await?;
        let open = store.open_batches(&self.target).await?;
        let is_idle = rows.is_empty() && open.iter().all(|batch| batch.state == BatchState::Abandoned);
        self.look |= self.is_time_to_look().await?;
        if self.asked.is_none_or(|asked| asked.elapsed() >= LOOK) {
            self.look |= self.shared.people.has_an_answer(&self.target).await?;
            self.asked = Some(tokio::time::Instant::now());
        }
        if is_idle && !self.look {
            return Ok(Outcome::Idle);
        }
        let _permit = if is_idle {
            // After a start, or together with all others, it can wait; a change that comes meanwhile cannot.
            let bell = Arc::clone(&self.bell);
            tokio::select! {
                permit = LOOKING.acquire() => Some(permit.context("looking at repositories")?),
                () = bell.notify.notified() => return Ok(Outcome::Again),
                () = self.stop.cancelled() => return Ok(Outcome::Idle),
            }
        } else {
            None
        };
        let clusters = self.connect().await?;
        let mirror = self.mirror.clone().context("no mirror")?;
        if self.look {
            self.tip = None;
        }
        let tip = match self.tip.take() {
            Some(tip) => tip,
            None => mirror.fetch().await?,
        };
        if !is_idle {
            faults::point("after-fetch");
        }
        if self.settle(&mirror, tip, &open).await? {
            self.tip = Some(tip);
            return Ok(Outcome::Again);
        }
        let has_read = self.read(&mirror, tip, &clusters).await?;
        if std::mem::take(&mut self.look) {
            self.looked = Some(tokio::time::Instant::now());
            // After the reading: a file that is back is no end.
            self.shared.people.take_answers(&self.target).await?;
        }
        // What follows from it waits in the outbox.
        let rows = if has_read || is_idle { store.outbox(&self.target, BATCH_MAX).await? } else { rows };
        if rows.is_empty() {
            self.tip = Some(tip);
            return Ok(if has_read { Outcome::Again } else { Outcome::Idle });
        }
        let work = self.plan(&mirror, tip, rows, &open, &clusters).await?;
        if !work.quiet.outbox.is_empty() {
            let revision = tip.map(|id| id.to_string());
            self.finish(None, revision.as_deref(), &work.quiet).await?;
        }
        if work.edits.is_empty() {
            self.drop_rows(&work.rows).await?;
            self.tip = Some(tip);
            return Ok(Outcome::Again);
        }
        self.write(&mirror, tip, work).await
    }

    /// Commits, records, pushes, looks, records. When the tip moves meanwhile and nobody changed what
    /// the work is about, the same work goes onto the new tip at once: planning thousands of rows anew
    /// takes longer than somebody else needs to move it again.
    async fn write(&mut self, mirror: &Mirror, mut tip: Option<Oid>, work: Work) -> Result<Outcome> {
        let shared = Arc::clone(&self.shared);
        let started = tokio::time::Instant::now();
        let work = Arc::new(work);
        loop {
            let now = shared.clock.now();
            let Some(commit) = self.commit(mirror, tip, &work, now).await? else {
                // Everything is there already: no commit for no change.
                self.drop_rows(&work.rows).await?;
                self.tip = Some(tip);
                return Ok(Outcome::Again);
            };
            let batch = Batch {
                commit_id: commit.to_string(),
                repository: self.target.repository.clone(),
                branch: self.target.branch.clone(),
                base: tip.map(|id| id.to_string()),
                rows: work.rows.clone(),
                state: BatchState::Prepared,
                created_at: now,
            };
            shared.store.prepare_batch(&batch, &self.lead).await?;
            faults::point("after-prepare");
            let answer = mirror.push(commit).await;
            faults::point("after-push");
            let new_tip = match (mirror.fetch().await, &answer) {
                (Ok(tip), _) => tip,
                // The first failure says more than the second.
                (Err(_), Err(_)) => {
                    return Err(answer.err().map_or_else(|| anyhow::anyhow!("push").into(), Into::into));
                }
                (Err(error), Ok(())) => return Err(error.into()),
            };
            faults::point("after-reread");
            if self.contains(mirror, new_tip, tip, commit).await? {
                self.finish(Some(&batch.commit_id), Some(&batch.commit_id), &work.rows).await?;
                faults::point("after-record");
                metrics::pushed(work.rows.instances.len());
                info!(
                    commit = batch.commit_id,
                    instances = work.rows.instances.len(),
                    superseded = work.rows.superseded.len(),
                    duration_ms = shared.clock.now() - now,
                    "pushed"
                );
                self.moved = 0;
                // Somebody committed after ours, or before it and it was not read yet.
                if shared.store.head(&self.target).await?.map(|(head, _)| head) != new_tip.map(|id| id.to_string()) {
                    self.look = true;
                }
                self.tip = Some(new_tip);
                self.gather = Some(started.elapsed().min(GATHER_MAX));
                self.tidy();
                return Ok(Outcome::Again);
            }
            shared.store.abandon_batch(&batch, &self.lead).await?;
            if new_tip == tip || self.moved >= MOVED_MAX {
                self.moved = 0;
                return Err(answer.err().map_or_else(
                    || {
                        anyhow::anyhow!(
                            "the repository accepted the push, but its branch does not have the commit: look for a hook \
                             or a mirror that rewrites pushes"
                        )
                        .into()
                    },
                    Into::into,
                ));
            }
            self.moved += 1;
            if !self.untouched(mirror, tip, new_tip, &work).await? {
                self.tip = Some(new_tip);
                return Ok(Outcome::Again);
            }
            tip = new_tip;
        }
    }

    /// Packs our copy, and the repository if it is this server's, beside everything else.
    fn tidy(&self) {
        static TIDYING: Semaphore = Semaphore::const_new(1);
        let Ok(permit) = TIDYING.try_acquire() else { return };
        let settings = &self.shared.settings;
        let hosted = self.target.repository.strip_prefix(EMBEDDED).map(|cluster| self.shared.host.path(cluster));
        let copy = self.mirror.as_ref().map(|mirror| mirror.path().to_owned());
        let most = settings.loose_objects;
        tokio::spawn(
            async move {
                for path in copy.into_iter().chain(hosted) {
                    match Mirror::tidy(&path, most, TIDY_LIMIT).await {
                        Ok(true) => info!(path = %path.display(), "packed"),
                        Ok(false) => {}
                        Err(error) => warn!(%error, path = %path.display(), "not packed; it is tried again later"),
                    }
                }
                drop(permit);
            }
            .instrument(self.span.clone()),
        );
    }

    /// Whether others may have committed something.
    async fn is_time_to_look(&self) -> Result<bool> {
        let is_due = |every| self.looked.is_none_or(|looked| looked.elapsed() >= every);
        if self.bell.look.swap(false, Ordering::Relaxed) || is_due(self.poll) {
            return Ok(true);
        }
        // A look at a repository of this server costs nothing.
        let Some(cluster) = self.target.repository.strip_prefix(EMBEDDED).filter(|_| is_due(LOOK)) else {
            return Ok(false);
        };
        let (host, cluster, branch) = (self.shared.host.clone(), cluster.to_owned(), self.target.branch.clone());
        let tip = spawn_blocking(move || host.tip(&cluster, &branch)).await.context("embedded repository")?;
        Ok(tip.map(|id| id.to_string()) != self.shared.store.head(&self.target).await?.map(|(head, _)| head))
    }

    /// Reads what others committed since the last time; `false`: nothing.
    async fn read(&self, mirror: &Mirror, tip: Option<Oid>, clusters: &HashMap<String, Cluster>) -> Result<bool> {
        let store = &self.shared.store;
        let ((base, count), tip) = match (store.head(&self.target).await?, tip) {
            (None, None) => return Ok(false),
            (Some((base, _)), None) => {
                return Err(anyhow::anyhow!(
                    "the branch \"{}\" is not there any more; push it again, it was at {base}",
                    self.target.branch
                )
                .into());
            }
            (None, Some(tip)) => {
                store.set_head(&self.target, &tip.to_string(), &self.lead).await?;
                return Ok(false);
            }
            (Some((base, _)), Some(tip)) if base == tip.to_string() => return Ok(false),
            (Some(head), Some(tip)) => (head, tip),
        };
        let folders =
            clusters.values().flat_map(|cluster| layout::FOLDERS.map(|folder| layout::below(&cluster.path, folder)));
        let (reader, folders) = (mirror.clone(), folders.collect::<Vec<_>>());
        let reading = spawn_blocking(move || reader.reading(&base, count, tip, &folders));
        let mut reading = reading.await.context("the commits of others could not be read")??;
        reading.lead = Some(self.lead.clone());
        // A forge of several machines may answer from one that is behind: nobody rewound anything then.
        if reading.rewound && mirror.fetch().await? != Some(tip) {
            return Err(
                anyhow::anyhow!("the repository answers with another commit each time; it is asked again").into()
            );
        }
        self.shared.people.found(&self.target, clusters, &reading).await?;
        faults::point(faults::READING);
        store.set_head(&self.target, &reading.tip.id, &self.lead).await?;
        self.shared.pushes.tell(&self.target);
        self.shared.wake.review(&self.target);
        Ok(true)
    }

    /// The work as a commit on `tip`; `None` when it changes nothing.
    async fn commit(&self, mirror: &Mirror, tip: Option<Oid>, work: &Arc<Work>, now: Millis) -> Result<Option<Oid>> {
        let committer = self.shared.settings.committer.clone();
        let author = work.message.single_author(&work.authors).map_or_else(
            || committer.clone(),
            |person| Signature { name: person.name.clone(), email: person.email.clone() },
        );
        let (mirror, work, signer) = (mirror.clone(), Arc::clone(work), Arc::clone(&self.shared.signer));
        let committed = spawn_blocking(move || {
            let stamp = Stamp {
                message: &work.message.text(),
                author: &author,
                committer: &committer,
                seconds: now.div_euclid(1000),
                signer: Some(&signer),
            };
            mirror.commit(tip, &work.edits, work.anyway, &stamp)
        });
        let commit = committed.await.context("the commit could not be made")??;
        faults::point("after-splice");
        Ok(commit)
    }

    /// Whether every file of the work is at the new tip as it was when the work was planned.
    async fn untouched(
        &self,
        mirror: &Mirror,
        tip: Option<Oid>,
        new_tip: Option<Oid>,
        work: &Arc<Work>,
    ) -> Result<bool> {
        let (mirror, work) = (mirror.clone(), Arc::clone(work));
        let same = spawn_blocking(move || mirror.same(tip, new_tip, work.edits.keys()));
        Ok(same.await.context("the repository could not be read")??)
    }

    async fn contains(&self, mirror: &Mirror, tip: Option<Oid>, base: Option<Oid>, commit: Oid) -> Result<bool> {
        let Some(tip) = tip else { return Ok(false) };
        let mirror = mirror.clone();
        let known: Vec<Oid> = base.into_iter().collect();
        let found = spawn_blocking(move || mirror.in_history(tip, &known, &HashSet::from([commit])));
        Ok(!found.await.context("the history could not be read")??.is_empty())
    }

    /// Finds out what became of earlier commits; `true` when one of them is in the history.
    async fn settle(&self, mirror: &Mirror, tip: Option<Oid>, open: &[Batch]) -> Result<bool> {
        let Some(first) = open.first() else { return Ok(false) };
        let mut wanted = HashMap::new();
        for batch in open {
            wanted.insert(Oid::from_str(&batch.commit_id)?, batch);
        }
        let found = match tip {
            None => HashSet::new(),
            Some(tip) => {
                let known: Vec<Oid> =
                    first.base.iter().map(|id| Oid::from_str(id)).collect::<std::result::Result<_, _>>()?;
                let mirror = mirror.clone();
                let ids: HashSet<Oid> = wanted.keys().copied().collect();
                spawn_blocking(move || mirror.in_history(tip, &known, &ids))
                    .await
                    .context("the history could not be read")??
            }
        };
        for (id, batch) in &wanted {
            if found.contains(id) {
                info!(commit = batch.commit_id, "an earlier push has arrived");
                self.finish(Some(&batch.commit_id), Some(&batch.commit_id), &batch.rows).await?;
            } else if batch.state == BatchState::Prepared {
                self.shared.store.abandon_batch(batch, &self.lead).await?;
            }
        }
        Ok(!found.is_empty())
    }

    /// Records that `revision` holds what `rows` ask for.
    async fn finish(&self, batch: Option<&str>, revision: Option<&str>, rows: &BatchRows) -> Result<()> {
        let store = &self.shared.store;
        for _ in 0..FINISH_ATTEMPTS {
            let pushed = Pushed {
                batch: batch.map(str::to_owned),
                target: self.target.clone(),
                revision: revision.map(str::to_owned),
                rows: rows.clone(),
                tasks: self.moved_tasks(batch.and(revision), rows).await?,
                lead: self.lead.clone(),
            };
            match store.finish_batch(&pushed).await {
                Err(StoreError::Conflict) => {}
                Err(error) => return Err(error.into()),
                Ok(()) => {
                    if revision.is_some() {
                        self.shared.wake.review(&self.target);
                        self.shared.pushes.tell(&self.target);
                    }
                    return Ok(());
                }
            }
        }
        Err(StoreError::Conflict.into())
    }

    /// The tasks of the instances in `rows`, and of older ones of the same deployments, as they are
    /// once `commit` (`None`: no commit was needed) is recorded.
    async fn moved_tasks(&self, commit: Option<&str>, rows: &BatchRows) -> Result<Vec<Task>> {
        let store = &self.shared.store;
        // Deployment → sequence of the named instance, and the highest of those left out.
        let mut deployments: BTreeMap<String, (Option<i64>, i64)> = BTreeMap::new();
        for (ids, named) in [(&rows.instances, true), (&rows.superseded, false)] {
            for place in store.instance_places(ids).await? {
                let known = deployments.entry(place.deployment_id).or_insert((None, place.last_sequence));
                if named {
                    *known = (Some(place.sequence), place.sequence);
                }
            }
        }
        let now = self.shared.clock.now();
        let mut moved = Vec::new();
        for (deployment, (named, by)) in deployments {
            let superseded: HashSet<&String> = rows.superseded.iter().collect();
            for mut task in store.running_tasks(&deployment, named.unwrap_or(by)).await? {
                let event = if named == Some(task.sequence) {
                    commit.map_or(Event::NothingToWrite, |revision| Event::Pushed {
                        revision,
                        branch: &self.target.branch,
                    })
                } else if named.is_some() || superseded.contains(&task.instance_id) {
                    Event::Superseded { by }
                } else {
                    continue;
                };
                if machine::apply(&mut task, &event, now) {
                    moved.push(task);
                }
            }
        }
        Ok(moved)
    }

    /// Rows that need no commit. Instances among them are recorded as being there.
    async fn drop_rows(&self, rows: &BatchRows) -> Result<()> {
        self.finish(None, None, rows).await
    }

    /// Opens the copy of the repository with the credentials as they are now.
    async fn connect(&mut self) -> Result<HashMap<String, Cluster>> {
        let clusters = self.shared.store.clusters_in(&self.target).await?;
        // URL and credentials of one cluster: those of another may be meant for another address.
        let chosen = clusters.iter().find(|row| row.credentials.is_some()).or(clusters.first());
        let chosen = chosen.context("no cluster uses this repository any more")?;
        let place = credentials_place(&chosen.id);
        let opened = chosen.credentials.as_ref().map(|sealed| self.shared.key.open(&place, sealed));
        let access = opened.transpose()?.map(|plain| Access::from_text(plain.expose()));
        let remote = self.shared.host.remote(chosen, access.unwrap_or_default()).await?;
        match &mut self.mirror {
            Some(mirror) => mirror.set_remote(remote),
            None => {
                let place = format!("{} {}", self.target.repository, self.target.branch);
                let name = canonical::short(&canonical::digest_bytes(place.as_bytes())).to_owned();
                let path = self.shared.settings.mirrors.join(format!("{name}.git"));
                let (branch, limit) = (self.target.branch.clone(), self.shared.settings.git_limit);
                let opened = spawn_blocking(move || Mirror::open(path, remote, branch, limit));
                self.mirror = Some(opened.await.context("the copy could not be opened")??);
            }
        }
        Ok(clusters.into_iter().map(|row| (row.id.clone(), row)).collect())
    }

    /// What the rows ask for, against what the repository has.
    async fn plan(
        &self,
        mirror: &Mirror,
        tip: Option<Oid>,
        rows: Vec<OutboxRow>,
        open: &[Batch],
        clusters: &HashMap<String, Cluster>,
    ) -> Result<Work> {
        let mut work = Work::default();
        let mut instance_rows: HashMap<String, i64> = HashMap::new();
        let mut restores = Vec::new();
        for row in rows {
            match row.kind {
                OutboxKind::Restore => {
                    work.rows.outbox.push(row.id);
                    let edit = self.shared.store.edit(&row.subject_id).await?;
                    let Some(edit) = edit.filter(|edit| edit.state == EditState::Restoring) else { continue };
                    if !row.author_name.is_empty() {
                        work.authors.push(Person { name: row.author_name, email: row.author_email });
                    }
                    restores.push(edit);
                }
                OutboxKind::Cluster => {
                    work.rows.outbox.push(row.id);
                    let Some(cluster) = clusters.get(&row.subject_id) else { continue };
                    let url = &self.shared.settings.public_url;
                    work.edits.extend(template::cluster(cluster, url, &self.shared.signer.public_key())?);
                    work.message.clusters.push(cluster.name.clone());
                    work.authors.push(Person { name: row.author_name, email: row.author_email });
                }
                OutboxKind::Agent => {
                    work.rows.outbox.push(row.id);
                    let Some(cluster) = clusters.get(&row.subject_id) else { continue };
                    let Some(release) = self.shared.store.agent_release(&cluster.id).await? else { continue };
                    work.edits.extend(template::agent(
                        cluster,
                        &release,
                        &self.shared.settings.public_url,
                        &self.shared.signer.public_key(),
                    )?);
                    work.message.agents.push(format!("{} {}", cluster.name, release.version));
                    work.authors.push(Person { name: row.author_name, email: row.author_email });
                }
                OutboxKind::Environment => {
                    work.rows.outbox.push(row.id);
                    let Some(environment) = self.shared.store.environment(&row.subject_id).await? else { continue };
                    let prefix = clusters.get(&environment.cluster_id).map_or("", |cluster| &cluster.path);
                    work.edits.extend(template::environment(&environment, prefix)?);
                    work.message.environments.push(environment.name);
                    work.authors.push(Person { name: row.author_name, email: row.author_email });
                }
                OutboxKind::Instance => {
                    instance_rows.insert(row.subject_id, row.id);
                }
            }
        }
        work.message.environments.dedup();
        // Only the newest of each deployment is read with its content: thousands may wait, and the
        // tip moves while they are read.
        let mut places: BTreeMap<String, InstancePlace> = BTreeMap::new();
        let mut older_ones: HashMap<String, Vec<String>> = HashMap::new();
        for place in self.shared.store.waiting_instances(&self.target, BATCH_MAX).await? {
            // A row that came after the others were read waits for the next round.
            let Some(row) = instance_rows.get(&place.id) else { continue };
            work.rows.outbox.push(*row);
            let older = match places.entry(place.deployment_id.clone()) {
                Slot::Vacant(empty) => {
                    empty.insert(place);
                    continue;
                }
                Slot::Occupied(mut newest) if newest.get().sequence < place.sequence => newest.insert(place),
                Slot::Occupied(_) => place,
            };
            older_ones.entry(older.deployment_id).or_default().push(older.id.clone());
            work.rows.superseded.push(older.id);
        }
        let ids: Vec<String> = places.into_values().map(|place| place.id).collect();
        let newest = self.shared.store.instances_to_write(&ids).await?;
        let folders = newest.iter().map(|item| folder(item, clusters)).collect::<anyhow::Result<Vec<_>>>()?;
        let existing = {
            let (mirror, paths) = (
                mirror.clone(),
                folders.iter().map(|folder| format!("{folder}/{}", layout::DEPLOYMENT_FILE)).collect::<Vec<_>>(),
            );
            spawn_blocking(move || mirror.read(tip, &paths)).await.context("the repository could not be read")??
        };
        let mut catalog = self.shared.drivers.catalog();
        if newest.iter().any(|item| !catalog.by_digest.contains_key(&item.instance.spec.driver.digest)) {
            // Another replica loaded it.
            self.shared.drivers.reload().await?;
            catalog = self.shared.drivers.catalog();
        }
        let in_flight: HashSet<&String> = open.iter().flat_map(|batch| &batch.rows.instances).collect();
        let in_flight: Vec<String> = in_flight.into_iter().cloned().collect();
        let in_flight = self.shared.store.instance_places(&in_flight).await?;
        let in_flight: HashSet<&str> = in_flight.iter().map(|place| place.deployment_id.as_str()).collect();
        let mut seen = HashSet::new();
        for ((item, folder), text) in newest.iter().zip(&folders).zip(&existing) {
            let place = Place {
                folder,
                exists: text.is_some(),
                committed: text.as_deref().and_then(|text| spec::read_committed(text).ok()),
                may_arrive: item.written || in_flight.contains(item.instance.deployment_id.as_str()),
                older: older_ones.get(&item.instance.deployment_id).map_or(&[], Vec::as_slice),
                rows: &instance_rows,
            };
            let named = work.message.entries.len();
            place_instance(&mut work, item, &place);
            if let Some(entry) = work.message.entries.get_mut(named).filter(|_| newest.len() <= DESCRIBED_MAX) {
                let before = self.shared.store.committed_instance(&entry.deployment).await?;
                let before = before.filter(|before| before.document.is_some());
                entry.changes = before.map(|old| diff::words(&old.spec, &item.instance.spec)).unwrap_or_default();
            }
            let digest = &item.instance.spec.driver.digest;
            if item.instance.document.is_some()
                && seen.insert((item.cluster_id.clone(), digest.clone()))
                && let Some(driver) = catalog.by_digest.get(digest)
            {
                let prefix = clusters.get(&item.cluster_id).map_or("", |cluster| &cluster.path);
                work.edits.extend(driver_files(driver, prefix)?);
            }
        }
        for edit in restores {
            self.restore(mirror, tip, &mut work, edit, clusters).await?;
        }
        Ok(work)
    }

    /// Adds what was there before somebody's edit, unless the work says otherwise already.
    async fn restore(
        &self,
        mirror: &Mirror,
        tip: Option<Oid>,
        work: &mut Work,
        edit: GitEdit,
        clusters: &HashMap<String, Cluster>,
    ) -> Result<()> {
        let Some(cluster) = clusters.get(&edit.cluster_id) else { return Ok(()) };
        let mut name = edit.path.clone();
        let files = match &edit.deployment_id {
            Some(id) => {
                let committed = self.shared.store.committed_instance(id).await?;
                let ids: Vec<String> = committed.into_iter().map(|instance| instance.id).collect();
                let item = self.shared.store.instances_to_write(&ids).await?.pop();
                let Some(item) = item.filter(|item| item.cluster_id == edit.cluster_id) else { return Ok(()) };
                name = format!("deployment {}", item.deployment_name);
                let files = deployment_files(&item.instance, &folder(&item, clusters)?);
                if files.contains_key(&edit.path) {
                    files
                } else {
                    // Anywhere else its document has no business; what is no document of it is somebody's.
                    let (mirror, paths) = (mirror.clone(), vec![edit.path.clone()]);
                    let read = spawn_blocking(move || mirror.read(tip, &paths));
                    let text = read.await.context("the repository could not be read")??.pop().flatten();
                    let is_its =
                        text.is_some_and(|text| text.contains(id.as_str()) && text.contains("StyrminDeployment"));
                    if is_its { Edits::from([(edit.path.clone(), Edit::Remove)]) } else { Edits::new() }
                }
            }
            None => self.shared_files(&edit.path, cluster).await?,
        };
        for (path, file) in files {
            match work.edits.entry(path) {
                Slot::Vacant(empty) => drop(empty.insert(file)),
                // That a file shall be there is not yet that it shall hold this.
                Slot::Occupied(mut known) if matches!(known.get(), Edit::Keep(_)) => drop(known.insert(file)),
                Slot::Occupied(_) => {}
            }
        }
        work.rows.restored.push(edit.id.clone());
        work.message.restored.push(Restored {
            name,
            path: edit.path.clone(),
            commit: edit.commit_id.clone(),
            author: edit.author(),
        });
        Ok(())
    }

    /// What a file that is no deployment's shall hold.
    async fn shared_files(&self, path: &str, cluster: &Cluster) -> Result<Edits> {
        let inside = path.strip_prefix(&cluster.path).unwrap_or(path).trim_start_matches('/');
        let parts: Vec<&str> = inside.split('/').collect();
        let mut files = match parts.as_slice() {
            ["environments", id, ..] | ["cluster", "environments", id] => {
                let id = id.strip_suffix(".yaml").unwrap_or(id);
                match self.shared.store.environment(id).await? {
                    Some(row) => template::environment(&row, &cluster.path)?,
                    None => Edits::new(),
                }
            }
            _ => {
                let catalog = self.shared.drivers.catalog();
                match catalog.of_file(inside) {
                    Some(driver) => driver_files(driver, &cluster.path)?,
                    None => Edits::new(),
                }
            }
        };
        files.retain(|known, _| known == path);
        for file in files.values_mut() {
            if let Edit::Keep(text) = file {
                *file = Edit::Write(std::mem::take(text));
            }
        }
        Ok(files)
    }
}

/// The files of an instance's deployment: written, or gone.
#[must_use]
pub fn deployment_files(instance: &Instance, folder: &str) -> Edits {
    let files = [(layout::DEPLOYMENT_FILE, &instance.document), (layout::SECRETS_FILE, &instance.secrets_file)];
    let edit = |(name, content): (&str, &Option<String>)| {
        let edit = match content {
            Some(text) if instance.document.is_some() => Edit::Write(text.clone()),
            _ => Edit::Remove,
        };
        (format!("{folder}/{name}"), edit)
    };
    files.into_iter().map(edit).collect()
}

fn folder(item: &InstanceToWrite, clusters: &HashMap<String, Cluster>) -> anyhow::Result<String> {
    let environment: EnvironmentId = item.environment_id.parse().map_err(anyhow::Error::msg)?;
    let deployment: DeploymentId = item.instance.deployment_id.parse().map_err(anyhow::Error::msg)?;
    let shard = u32::try_from(item.shard)?;
    let prefix = clusters.get(&item.cluster_id).map_or("", |cluster| cluster.path.as_str());
    Ok(layout::below(prefix, &layout::deployment_folder(&environment, shard, &deployment)))
}

/// What is known about the place of one instance in the repository.
struct Place<'a> {
    /// Folder of the deployment.
    folder: &'a str,
    /// The deployment's file is at the tip.
    exists: bool,
    /// What it says, when it can be read.
    committed: Option<Committed>,
    /// An earlier instance was written, or its push is perhaps still under way.
    may_arrive: bool,
    /// Older instances of the deployment that wait too.
    older: &'a [String],
    /// Outbox rows by instance.
    rows: &'a HashMap<String, i64>,
}

/// Adds one instance to the work: its files, or the absence of its deployment's.
fn place_instance(work: &mut Work, item: &InstanceToWrite, place: &Place<'_>) {
    let instance = &item.instance;
    let sequence = u64::try_from(instance.sequence).unwrap_or_default();
    // Another replica wrote a newer one of ours. A number that we never gave is a person's edit.
    let newer = place.committed.as_ref().is_some_and(|file| {
        file.sequence > sequence && i64::try_from(file.sequence).is_ok_and(|file| file <= item.last_sequence)
    });
    if newer {
        work.rows.superseded.push(instance.id.clone());
        return;
    }
    let absent = instance.document.is_none() && !place.exists;
    let there = place.committed.as_ref().is_some_and(|file| file.instance_id == instance.id);
    if there || (absent && !place.may_arrive) {
        // Nothing to do for it: its row leaves without being named in a commit, and with it, in
        // the same transaction, those of older ones, which would otherwise come back without it.
        let ids = std::iter::once(&instance.id).chain(place.older);
        let rows: HashSet<i64> = ids.filter_map(|id| place.rows.get(id).copied()).collect();
        work.rows.outbox.retain(|id| !rows.contains(id));
        work.rows.superseded.retain(|id| !place.older.contains(id));
        work.quiet.outbox.extend(rows);
        work.quiet.superseded.extend_from_slice(place.older);
        work.quiet.instances.push(instance.id.clone());
        return;
    }
    // A removal that finds nothing, while an earlier push may still arrive: only a commit on this
    // tip makes sure that it cannot.
    work.anyway |= absent;
    work.edits.extend(deployment_files(instance, place.folder));
    work.rows.instances.push(instance.id.clone());
    work.message.entries.push(Entry::of(instance, &item.deployment_name));
}

/// The driver's ConfigMap and its chart, unless they are there: both are named by content.
///
/// # Errors
/// When an object cannot be written as YAML.
pub fn driver_files(driver: &Driver, prefix: &str) -> anyhow::Result<Edits> {
    let mut edits = Edits::new();
    let map = yaml::to_string(&objects::driver_config_map(driver))?;
    edits.insert(layout::below(prefix, &layout::driver_file(driver.name(), &driver.digest)), Edit::Keep(map));
    let folder = layout::chart_folder(driver.name(), &driver.digest);
    for (path, content) in driver.chart_files() {
        edits.insert(layout::below(prefix, &format!("{folder}/{path}")), Edit::Keep(content.to_owned()));
    }
    Ok(edits)
}
