//! What people change in a cluster's repository by hand, and what follows from it.
//!
//! ```text
//! repository (writer, before it plans) ──► Reading: files that differ, their content, commit and author
//!        │
//!        ▼
//! verdict (pure): what was done to a deployment's files, against the instance that is in the repository
//!        │
//!        ├── adopt ──► express (pure) ──► a change like any other, by the commit's author ──┐
//!        ├── restore ─► outbox row `restore` ─► the writer puts the file back                ├─► one transaction
//!        └── hold ────► changes of the deployment are kept back until somebody decides       ┘   with the edit's row
//! ```
//!
//! The head of the branch moves only when all of a reading was recorded, so a crash reads again; what was recorded is
//! not found twice. Compared is always with what the database says was written, never with the commit before: our
//! own commits, squashed, rebased or rewound ones, and files that were put back by hand need no rule of their own.
//! What must never enter: Git objects; how a file is written.

pub(super) mod express;
pub(super) mod verdict;

use super::compute::Edit;
use super::{ChangeError, Changes, Result, invalid};
use crate::repository::{self, Content, Finding, Reading};
use crate::store::{
    Cluster, Deployment, EditKind, EditPolicy, EditScope, EditState, Environment, GitEdit, Instance, InstanceState,
    Person, StoreError, Target,
};
use anyhow::Context as _;
use async_trait::async_trait;
use std::collections::{BTreeMap, HashMap, HashSet};
use styrmin_renderer::layout;
use styrmin_renderer::names::{DeploymentId, EnvironmentId};
use tracing::{error, info, warn};
use verdict::{Files, Verdict, verdict};

/// Most files that are looked into for whose document they hold.
const STRAYS_MAX: usize = 2_000;
/// Longest message that is stored.
const MESSAGE_MAX: usize = 2_000;

/// What somebody decides about an edit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// It becomes a change of the deployment; a removal is confirmed.
    Adopt,
    /// It is put back.
    Restore,
}

/// The findings of one deployment.
#[derive(Default)]
struct Group {
    document: Option<Finding>,
    secrets: Option<Finding>,
    /// Its documents at other places.
    strays: Vec<Finding>,
}

/// The findings of one cluster.
#[derive(Default)]
struct Sorted {
    deployments: BTreeMap<String, Group>,
    /// Files of environments, drivers and charts that hold something else.
    others: Vec<Finding>,
    /// Files that hold what we wrote, and files that are not there and need not be.
    settled: Vec<String>,
}

/// An edited deployment with what it is compared with.
struct Case {
    row: GitEdit,
    verdict: Verdict,
    committed: Instance,
    named: Option<Instance>,
    /// Where else its document lies.
    strays: Vec<Finding>,
    /// What its message says besides.
    note: Option<String>,
    /// Its file is there, and asks for the end.
    is_word: bool,
}

#[async_trait]
impl repository::People for Changes {
    async fn found(
        &self,
        target: &Target,
        clusters: &HashMap<String, Cluster>,
        reading: &Reading,
    ) -> anyhow::Result<()> {
        for cluster in clusters.values() {
            self.found_in(cluster, target, reading).await.with_context(|| format!("cluster \"{}\"", cluster.name))?;
        }
        Ok(())
    }

    async fn has_an_answer(&self, target: &Target) -> anyhow::Result<bool> {
        Ok(!self.store.confirmed_removals(target).await?.is_empty())
    }

    async fn take_answers(&self, target: &Target) -> anyhow::Result<()> {
        for row in self.store.confirmed_removals(target).await? {
            let message = "somebody confirmed the removal on the object, and the application is gone";
            let row = self.decided(row, EditState::Adopted, message);
            self.delete(row).await?;
        }
        Ok(())
    }
}

impl Group {
    /// Somebody wants its deployment gone.
    fn is_removed(&self) -> bool {
        self.document.as_ref().is_some_and(|document| document.blob.is_none()) && self.strays.is_empty()
    }
}

impl Sorted {
    /// Sorts a file that is one of `files`, or nobody's.
    fn other(&mut self, finding: &Finding, files: &repository::Edits) {
        use repository::Edit::{Keep, Remove, Write};
        let is_ours = match files.get(&finding.path) {
            None => return,
            Some(Write(text) | Keep(text)) => finding.holds(text),
            Some(Remove) => finding.blob.is_none(),
        };
        if is_ours { self.settled.push(finding.path.clone()) } else { self.others.push(finding.clone()) }
    }
}

impl Changes {
    /// Takes what a reading found in the folder of one cluster.
    async fn found_in(&self, cluster: &Cluster, target: &Target, reading: &Reading) -> Result<()> {
        let known: HashSet<String> = self.store.edits_of(&cluster.id, &reading.name()).await?.into_iter().collect();
        let nobody = Person { name: String::new(), email: String::new() };
        if reading.rewound && !known.contains("") {
            let message = format!(
                "the branch was rewound or forced: it was at {}, and does not lead on from there; it is taken as it is",
                reading.base
            );
            let row = self.row(cluster, reading, EditKind::Rewound, None, "", &reading.tip, None);
            let row = self.decided(row, EditState::Noted, &message);
            warn!(cluster = cluster.name, tip = reading.tip.id, message, "rewound");
            self.store.record_edits(&[row], target, &nobody).await?;
        }
        let mut sorted = self.sort(cluster, reading).await?;
        self.take_merged(target, reading, &mut sorted).await?;
        let removals = sorted.deployments.values().filter(|group| group.is_removed()).count();
        let many = i64::try_from(removals).unwrap_or(i64::MAX) > cluster.removal_threshold;
        for (id, group) in std::mem::take(&mut sorted.deployments) {
            let Some(case) = self.case(cluster, reading, &id, group, &mut sorted.settled).await? else { continue };
            if known.contains(&case.row.path) {
                continue;
            }
            info!(
                cluster = cluster.name,
                path = case.row.path,
                kind = case.row.kind.as_str(),
                commit = case.row.commit_id,
                "somebody edited"
            );
            let mut rows = self.strays(&case, cluster.edit_policy);
            match cluster.edit_policy {
                EditPolicy::Hold => {
                    let mut row = self.held(case.row);
                    if let (Verdict::Broken(problem), Some(message)) = (&case.verdict, &mut row.message) {
                        message.insert_str(0, &format!("{problem}; "));
                    }
                    rows.push(row);
                }
                EditPolicy::Restore => {
                    rows.push(self.decided(case.row, EditState::Restoring, "edits of this cluster are put back"));
                }
                EditPolicy::Adopt if case.row.kind == EditKind::Removed && (many || case.is_word) => {
                    let reason = if case.is_word {
                        "a word in a file is no removal yet".to_owned()
                    } else {
                        format!("{removals} at once, {} are taken over without asking", cluster.removal_threshold)
                    };
                    let message = format!(
                        "{reason}: the application runs on until somebody confirms the removal with decideEdit or on the object, or has it put back"
                    );
                    rows.push(GitEdit { state: EditState::Waiting, message: Some(message), ..case.row });
                }
                EditPolicy::Adopt => rows.extend(self.adopt_or_put_back(case).await?),
            }
            self.record(&rows, target, &nobody).await?;
        }
        let mut rows = Vec::new();
        for finding in sorted.others.iter().filter(|finding| !known.contains(&finding.path)) {
            let row = self.row(cluster, reading, EditKind::Other, None, &finding.path, &finding.commit, None);
            rows.push(match cluster.edit_policy {
                EditPolicy::Hold => self.held(row),
                _ => self.decided(row, EditState::Restoring, "no deployment's configuration can say it"),
            });
        }
        self.record(&rows, target, &nobody).await?;
        let now = self.clock.now();
        Ok(self.store.close_edits(&cluster.id, &sorted.settled, now, reading.lead.as_ref()).await?)
    }

    /// What a merge brought is no edit.
    async fn take_merged(&self, target: &Target, reading: &Reading, sorted: &mut Sorted) -> Result<()> {
        let mut merges = Vec::new();
        for (id, group) in &sorted.deployments {
            let Some(finding) = &group.document else { continue };
            // A file that lies elsewhere, or is gone with a branch that somebody rewound, is no reviewed end.
            if finding.blob.is_none() && (reading.rewound || !group.strays.is_empty()) {
                continue;
            }
            let Some(content) = reading.contents(vec![finding.path.clone()]).await?.pop() else { continue };
            merges.extend(self.merge_of(id, &content, &finding.commit).await?);
        }
        if merges.is_empty() {
            return Ok(());
        }
        let taken = self.take_merges(target, merges, reading.lead.as_ref()).await?;
        for (id, secrets) in taken {
            let Some(group) = sorted.deployments.get_mut(&id) else { continue };
            // Its file is as we write it, or about to be: what was open about it is over.
            sorted.settled.extend(group.document.take().map(|finding| finding.path));
            let same = match (&group.secrets, &secrets) {
                (Some(found), Some(text)) => found.holds(text),
                (Some(found), None) => found.blob.is_none(),
                (None, _) => true,
            };
            if same {
                sorted.settled.extend(group.secrets.take().map(|finding| finding.path));
                sorted.deployments.remove(&id);
            }
        }
        Ok(())
    }

    async fn record(&self, rows: &[GitEdit], target: &Target, author: &Person) -> Result<()> {
        if rows.is_empty() {
            return Ok(());
        }
        self.store.record_edits(rows, target, author).await?;
        for row in rows.iter().filter(|row| row.state == EditState::Held) {
            self.explain_held(row).await?;
        }
        Ok(())
    }

    /// One edit that goes wrong inside must not keep all others from being seen.
    async fn adopt_or_put_back(&self, case: Case) -> Result<Option<GitEdit>> {
        let row = case.row.clone();
        match self.adopt(case).await {
            Err(ChangeError::Internal(error)) => {
                error!(error = format!("{error:#}"), path = row.path, "an edit cannot be taken over");
                Ok(Some(self.decided(row, EditState::Restoring, "it cannot be taken over; the server's log says why")))
            }
            other => other,
        }
    }

    /// Whose file each finding is. Those of nobody we know are not ours.
    async fn sort(&self, cluster: &Cluster, reading: &Reading) -> Result<Sorted> {
        let mut sorted = Sorted::default();
        let mut environments: HashMap<String, Option<Environment>> = HashMap::new();
        let mut strays = Vec::new();
        for finding in &reading.findings {
            let inside = match cluster.path.as_str() {
                "" => Some(finding.path.as_str()),
                prefix => finding.path.strip_prefix(prefix).and_then(|rest| rest.strip_prefix('/')),
            };
            let Some(inside) = inside else { continue };
            let parts: Vec<&str> = inside.split('/').collect();
            match parts.as_slice() {
                ["environments", _, _, id, file] if [layout::DEPLOYMENT_FILE, layout::SECRETS_FILE].contains(file) => {
                    let deployment = self.store.deployment(id).await?.filter(|row| {
                        folder(cluster, row).is_some_and(|folder| finding.path == format!("{folder}/{file}"))
                    });
                    let Some(deployment) = deployment else {
                        strays.push(finding);
                        continue;
                    };
                    if !self.is_in(cluster, &deployment.environment_id, &mut environments).await? {
                        continue;
                    }
                    let group = sorted.deployments.entry(deployment.id).or_default();
                    match *file {
                        layout::DEPLOYMENT_FILE => group.document = Some(finding.clone()),
                        _ => group.secrets = Some(finding.clone()),
                    }
                }
                ["environments", id, _, "keep.yaml"] | ["cluster", "environments", id] => {
                    let id = id.strip_suffix(".yaml").unwrap_or(id);
                    if !self.is_in(cluster, id, &mut environments).await? {
                        continue;
                    }
                    let Some(Some(row)) = environments.get(id) else { continue };
                    sorted.other(finding, &repository::environment_files(row, &cluster.path)?);
                }
                ["cluster", "drivers", _] | ["charts", _, ..] => {
                    let catalog = self.drivers.catalog();
                    let Some(driver) = catalog.of_file(inside) else { continue };
                    sorted.other(finding, &repository::driver_files(driver, &cluster.path)?);
                }
                ["environments", ..] => strays.push(finding),
                _ => {}
            }
        }
        if reading.whole {
            self.add_absent(cluster, reading, &mut sorted).await?;
        }
        self.add_strays(cluster, reading, &strays, &mut environments, &mut sorted).await?;
        Ok(sorted)
    }

    /// Documents of our deployments at places where they do not belong.
    async fn add_strays(
        &self,
        cluster: &Cluster,
        reading: &Reading,
        strays: &[&Finding],
        environments: &mut HashMap<String, Option<Environment>>,
        sorted: &mut Sorted,
    ) -> Result<()> {
        let is_yaml = |path: &str| path.ends_with(".yaml") || path.ends_with(".yml");
        sorted.settled.extend(strays.iter().filter(|stray| stray.blob.is_none()).map(|stray| stray.path.clone()));
        let strays: Vec<&&Finding> =
            strays.iter().filter(|stray| stray.blob.is_some() && is_yaml(&stray.path)).take(STRAYS_MAX).collect();
        for stray in strays {
            let content = reading.contents(vec![stray.path.clone()]).await?;
            let text = content.first().and_then(Content::text).filter(|text| text.contains("StyrminDeployment"));
            let Some(named) = text.and_then(verdict::named) else { continue };
            let Some(instance) = self.store.instance(&named).await? else { continue };
            let Some(deployment) = self.store.deployment(&instance.deployment_id).await? else { continue };
            // Another cluster's deployment has no business here, and this one none with it.
            if !self.is_in(cluster, &deployment.environment_id, environments).await? {
                continue;
            }
            let Some(folder) = folder(cluster, &deployment) else { continue };
            let path = format!("{folder}/{}", layout::DEPLOYMENT_FILE);
            let group = sorted.deployments.entry(deployment.id).or_default();
            group.strays.push((*stray).clone());
            if group.document.is_none() && reading.contents(vec![path.clone()]).await? == [Content::Absent] {
                // It was moved once more.
                group.document = Some(Finding { path, blob: None, commit: stray.commit.clone() });
            }
        }
        Ok(())
    }

    /// A reading without a beginning lists only what is there.
    async fn add_absent(&self, cluster: &Cluster, reading: &Reading, sorted: &mut Sorted) -> Result<()> {
        for place in self.store.deployment_places(&cluster.id).await? {
            if sorted.deployments.get(&place.id).is_some_and(|group| group.document.is_some()) {
                continue;
            }
            let Some(row) = self.store.deployment(&place.id).await? else { continue };
            let Some(folder) = folder(cluster, &row) else { continue };
            let path = format!("{folder}/{}", layout::DEPLOYMENT_FILE);
            let finding = Finding { path, blob: None, commit: reading.tip.clone() };
            sorted.deployments.entry(place.id).or_default().document = Some(finding);
        }
        Ok(())
    }

    async fn is_in(
        &self,
        cluster: &Cluster,
        environment: &str,
        known: &mut HashMap<String, Option<Environment>>,
    ) -> Result<bool> {
        if !known.contains_key(environment) {
            let row = self.store.environment(environment).await?;
            known.insert(environment.to_owned(), row);
        }
        Ok(known.get(environment).and_then(Option::as_ref).is_some_and(|row| row.cluster_id == cluster.id))
    }

    /// What was done to a deployment's files. Those that are as we wrote them are settled.
    async fn case(
        &self,
        cluster: &Cluster,
        reading: &Reading,
        id: &str,
        group: Group,
        settled: &mut Vec<String>,
    ) -> Result<Option<Case>> {
        let Some(deployment) = self.store.deployment(id).await? else { return Ok(None) };
        // Nothing of it was written yet: what is there is nothing that we know.
        let Some(committed) = self.store.committed_instance(id).await? else { return Ok(None) };
        let environment: EnvironmentId = super::parse_id("environment", &deployment.environment_id)?;
        let read = async |finding: Option<&Finding>| match finding {
            Some(finding) => Ok::<_, ChangeError>(reading.contents(vec![finding.path.clone()]).await?.pop()),
            None => Ok(None),
        };
        let (document, secrets) = (read(group.document.as_ref()).await?, read(group.secrets.as_ref()).await?);
        let text = document.as_ref().and_then(Content::text);
        let named = self.named_instance(id, text).await?;
        let files =
            Files { document: document.as_ref(), secrets: secrets.as_ref(), elsewhere: !group.strays.is_empty() };
        let committed = match &group.document {
            Some(finding) => self.as_adopted(cluster, &finding.path, committed).await?,
            None => committed,
        };
        let verdict = verdict(&environment, &committed, named.as_ref(), files);
        let Some(kind) = verdict.kind() else {
            settled.extend([group.document, group.secrets].into_iter().flatten().map(|finding| finding.path));
            return Ok(None);
        };
        let finding = match kind {
            EditKind::Secrets => group.secrets.or(group.document),
            _ => group.document.or(group.secrets),
        };
        let Some(finding) = finding else { return Ok(None) };
        // Kept for a later decision; what somebody may have put in clear is not kept a second time.
        let content = match &verdict {
            Verdict::Changed { found, .. } if verdict::shows_a_secret(&committed.spec, found) => None,
            Verdict::Returned
                if text
                    .and_then(verdict::spec_of)
                    .is_none_or(|found| verdict::shows_a_secret(&committed.spec, &found)) =>
            {
                None
            }
            Verdict::Changed { .. } | Verdict::Reverted | Verdict::Returned => text.map(str::to_owned),
            _ => None,
        };
        let is_word = verdict == Verdict::Removed && text.is_some();
        let row = self.row(cluster, reading, kind, Some(id), &finding.path, &finding.commit, content);
        Ok(Some(Case { row, verdict, committed, named, strays: group.strays, note: None, is_word }))
    }

    /// What the repository would hold if an edit that was adopted, but whose instance is not written yet, were ours: a
    /// further edit of the same file is one of that.
    async fn as_adopted(&self, cluster: &Cluster, path: &str, committed: Instance) -> Result<Instance> {
        let Some(adopted) = self.store.adopted_edit(&cluster.id, path).await? else { return Ok(committed) };
        if adopted.kind == EditKind::Removed {
            return Ok(Instance { document: None, ..committed });
        }
        let Some(document) = adopted.content else { return Ok(committed) };
        let Some(spec) = verdict::spec_of(&document) else { return Ok(committed) };
        let newest = match &adopted.task_id {
            Some(task) => self.store.task(task).await?,
            None => None,
        };
        let newest = match newest {
            Some(task) => self.store.instance(&task.instance_id).await?,
            None => None,
        };
        let origins = newest.map_or_else(|| committed.origins.clone(), |newest| newest.origins);
        Ok(Instance { document: Some(document), spec, origins, ..committed })
    }

    async fn named_instance(&self, deployment: &str, document: Option<&str>) -> Result<Option<Instance>> {
        let Some(id) = document.and_then(verdict::named) else { return Ok(None) };
        Ok(self.store.instance(&id).await?.filter(|found| found.deployment_id == deployment))
    }

    #[expect(clippy::too_many_arguments, reason = "all of it is what an edit consists of")]
    fn row(
        &self,
        cluster: &Cluster,
        reading: &Reading,
        kind: EditKind,
        deployment: Option<&str>,
        path: &str,
        commit: &repository::CommitEntry,
        content: Option<String>,
    ) -> GitEdit {
        GitEdit {
            id: uuid::Uuid::now_v7().to_string(),
            cluster_id: cluster.id.clone(),
            deployment_id: deployment.map(str::to_owned),
            path: path.to_owned(),
            kind,
            state: EditState::Noted,
            commit_id: commit.id.clone(),
            author_name: commit.name.clone(),
            author_email: commit.email.clone(),
            reading: reading.name(),
            content,
            message: None,
            task_id: None,
            created_at: self.clock.now(),
            decided_at: None,
            lead: reading.lead.clone(),
        }
    }

    fn decided(&self, row: GitEdit, state: EditState, message: &str) -> GitEdit {
        let mut message = message.to_owned();
        if message.len() > MESSAGE_MAX {
            let end = (0..=MESSAGE_MAX).rev().find(|end| message.is_char_boundary(*end)).unwrap_or_default();
            message.truncate(end);
            message.push('…');
        }
        GitEdit { state, message: Some(message), decided_at: Some(self.clock.now()), ..row }
    }

    fn held(&self, row: GitEdit) -> GitEdit {
        let message = "edits of this cluster are held: what Flux applied runs, and changes of the deployment wait until somebody decides with decideEdit";
        GitEdit { state: EditState::Held, message: Some(message.to_owned()), ..row }
    }

    /// A document that was moved goes from where it lies now, or is held there like the place that it left.
    fn strays(&self, case: &Case, policy: EditPolicy) -> Vec<GitEdit> {
        if case.verdict != Verdict::Moved {
            return Vec::new();
        }
        let row = |stray: &Finding| {
            let (id, path) = (uuid::Uuid::now_v7().to_string(), stray.path.clone());
            let row = GitEdit { id, path, content: None, ..case.row.clone() };
            match policy {
                EditPolicy::Hold => self.held(row),
                _ => self.decided(row, EditState::Restoring, "a deployment has one place for ever"),
            }
        };
        case.strays.iter().map(row).collect()
    }

    /// Makes an edit a change of its deployment, in one transaction with its row. What cannot become one is given
    /// back, to be put back.
    async fn adopt(&self, case: Case) -> Result<Option<GitEdit>> {
        let Case { row, verdict, committed, named, note, .. } = case;
        let noted = |message: String| note.as_ref().map_or(message.clone(), |note| format!("{message}; {note}"));
        let Some(id) = row.deployment_id.clone() else { return Ok(None) };
        let refuse = |row, reason: &str| Ok(Some(self.decided(row, EditState::Restoring, reason)));
        let Some(deployment) = self.store.deployment(&id).await? else { return Ok(None) };
        let (edit, message) = match verdict {
            Verdict::Ours => return Ok(None),
            Verdict::Changed { found, beside } => {
                let mut said = express::express(&committed, &found, &deployment.driver_name, &self.drivers.catalog());
                if beside {
                    said.refused.push("metadata (it follows from the deployment)".to_owned());
                }
                if said.taken.is_empty() && said.refused.is_empty() {
                    // Who put it back would fight with whoever formats it.
                    let message = "nothing that counts differs: comments, formatting, or fields that nobody reads; it stays until the next change";
                    return Ok(Some(self.decided(row, EditState::Noted, message)));
                }
                if said.taken.is_empty() {
                    return refuse(row, &said.message());
                }
                let message = said.message();
                (said.edit, message)
            }
            Verdict::Reverted | Verdict::Returned => {
                let Some(named) = named.filter(|named| named.document.is_some() && named.sources.is_some()) else {
                    return refuse(row, "it names no instance that this server kept");
                };
                let Some(driver) = self.drivers.catalog().by_digest.get(&named.spec.driver.digest).cloned() else {
                    return refuse(row, "the driver of that instance cannot be used by this release");
                };
                let message = format!("back to change {}", named.sequence);
                let revive = row.kind == EditKind::Returned;
                if !revive && deployment.newest_instance_id.as_ref() != Some(&committed.id) {
                    // A change that is on its way counts as well: only what the revert takes back is taken back.
                    let name = &deployment.driver_name;
                    let said = express::express(&committed, &named.spec, name, &self.drivers.catalog());
                    let message = format!("{message}, beside a newer change; {}", said.message());
                    (said.edit, message)
                } else {
                    (Edit { restore: Some((Box::new(named), driver)), revive, ..Edit::default() }, message)
                }
            }
            Verdict::Removed => {
                let row =
                    self.decided(row, EditState::Adopted, &noted("taken over as the end of the deployment".to_owned()));
                self.delete(row).await?;
                return Ok(None);
            }
            Verdict::Moved => return refuse(row, "a deployment has one place for ever; create another one there"),
            Verdict::Emptied => {
                return refuse(row, "an empty file says nothing; remove it, or the deployment, to end the deployment");
            }
            Verdict::Broken(problem) => return refuse(row, &problem),
            Verdict::Secrets => return refuse(row, "secrets are set as parameters, which this server encrypts"),
        };
        let adopted = self.decided(row.clone(), EditState::Adopted, &noted(message.clone()));
        let author = row.author();
        let changed =
            self.edit(&id, None, &author, |_| Ok(Edit { found: Some(Box::new(adopted.clone())), ..edit.clone() }));
        match changed.await {
            Ok(changed) if changed.task.is_some() => Ok(None),
            // What is on its way says it already, and replaces the file.
            Ok(changed) if changed.deployment.newest_instance_id.as_ref() != Some(&committed.id) => Ok(Some(adopted)),
            Ok(_) => refuse(row, &format!("the deployment says the same already; {message}")),
            Err(ChangeError::Store(StoreError::Exists)) => {
                refuse(row, "another deployment of the environment has its name now")
            }
            Err(error @ (ChangeError::Invalid(_) | ChangeError::NotFound { .. })) => refuse(row, &error.to_string()),
            Err(error) => Err(error),
        }
    }

    /// The end of a deployment whose files somebody removed.
    async fn delete(&self, row: GitEdit) -> Result<()> {
        let Some(id) = row.deployment_id.clone() else { return Ok(()) };
        let author = row.author();
        let changed = self.edit(&id, None, &author, |_| {
            Ok(Edit { delete: true, found: Some(Box::new(row.clone())), ..Edit::default() })
        });
        if changed.await?.task.is_none() {
            // It is going already.
            let target = self.target_of(&row.cluster_id).await?;
            self.store.record_edits(&[row], &target, &author).await?;
        }
        Ok(())
    }

    async fn target_of(&self, cluster: &str) -> Result<Target> {
        let row = self.cluster(cluster).await?;
        Ok(Target { repository: row.repository, branch: row.branch })
    }

    /// Tells the change of a deployment that waits for a decision why it waits.
    async fn explain_held(&self, row: &GitEdit) -> Result<()> {
        let Some(id) = &row.deployment_id else { return Ok(()) };
        let deployment = self.store.deployment(id).await?;
        let Some(newest) = deployment.and_then(|row| row.newest_instance_id) else { return Ok(()) };
        let waits = self.store.instance(&newest).await?.is_some_and(|found| found.state == InstanceState::Pending);
        if waits {
            let message = format!(
                "Waiting for a decision: {} changed {} in commit {}; adopt that edit or have it put back (edit {})",
                row.author_name, row.path, row.commit_id, row.id
            );
            self.store.explain_waiting(&[newest], &message).await?;
        }
        Ok(())
    }

    /// Tells a new change that an edit of its deployment is held, if one is.
    pub(super) async fn explain_if_held(&self, deployment: &str) -> Result<()> {
        match self.store.held_edit(deployment).await? {
            Some(row) => self.explain_held(&row).await,
            None => Ok(()),
        }
    }

    async fn decide(&self, rows: &[GitEdit], target: &Target, person: &Person) -> Result<()> {
        match self.store.record_edits(rows, target, person).await {
            // Somebody else decided at the same moment, or a newer edit came in.
            Err(StoreError::Conflict) => Err(ChangeError::Busy),
            other => Ok(other?),
        }
    }

    /// Decides about an edit that is held or waits for a confirmation.
    ///
    /// # Errors
    /// When it does not exist, was decided already, or cannot become a change of the deployment.
    pub async fn decide_edit(&self, id: &str, decision: Decision, person: &Person) -> Result<GitEdit> {
        let not_found = || ChangeError::NotFound { kind: "edit", id: id.to_owned() };
        let row = self.store.edit(id).await?.ok_or_else(not_found)?;
        let object = format!("edit \"{id}\"");
        if !matches!(row.state, EditState::Held | EditState::Waiting) {
            let message = format!("is {}; only an edit that is held or waits can be decided", row.state.as_str());
            return Err(invalid(object, "state", message));
        }
        let target = self.target_of(&row.cluster_id).await?;
        match decision {
            Decision::Restore => {
                // What was moved goes back from all of its places.
                let mut rows = vec![row];
                if let (EditKind::Moved, Some(deployment)) = (rows[0].kind, rows[0].deployment_id.clone()) {
                    let all = self.store.edits(EditScope::Deployment(&deployment), None, 500).await?;
                    let belongs = |other: &GitEdit| {
                        other.id != id && other.state == EditState::Held && other.reading == rows[0].reading
                    };
                    let others: Vec<GitEdit> = all.into_iter().filter(belongs).collect();
                    rows.extend(others);
                }
                let message = format!("{} has it put back", person.name);
                let decided: Vec<GitEdit> =
                    rows.into_iter().map(|row| self.decided(row, EditState::Restoring, &message)).collect();
                self.decide(&decided, &target, person).await?;
            }
            Decision::Adopt => {
                let Some(mut case) = self.stored_case(&row).await? else {
                    return Err(invalid(object, "decision", "this file can only be put back; decide RESTORE"));
                };
                case.note = Some(format!("decided by {}", person.name));
                let row = case.row.clone();
                match self.adopt(case).await? {
                    Some(refused) if refused.state == EditState::Restoring => {
                        let reason = refused.message.unwrap_or_default();
                        let message = format!("it cannot be adopted: {reason}; decide RESTORE");
                        return Err(invalid(object, "decision", message));
                    }
                    // A change that waits says the same already.
                    Some(adopted) => self.decide(&[adopted], &target, person).await?,
                    None if self.store.edit(id).await?.is_some_and(|now| now.state == row.state) => {
                        // Its file is as we wrote it by now.
                        self.store.close_edits(&row.cluster_id, &[row.path], self.clock.now(), None).await?;
                    }
                    None => {}
                }
            }
        }
        self.wake(&target).await;
        self.store.edit(id).await?.ok_or_else(not_found)
    }

    /// An edit that was found before, against what is in the repository now.
    async fn stored_case(&self, row: &GitEdit) -> Result<Option<Case>> {
        let Some(id) = &row.deployment_id else { return Ok(None) };
        let Some(deployment) = self.store.deployment(id).await? else { return Ok(None) };
        let Some(committed) = self.store.committed_instance(id).await? else { return Ok(None) };
        let environment: EnvironmentId = super::parse_id("environment", &deployment.environment_id)?;
        let named = self.named_instance(id, row.content.as_deref()).await?;
        let content = row.content.clone().map_or(Content::Absent, Content::Text);
        let verdict = match row.kind {
            EditKind::Secrets => Verdict::Secrets,
            EditKind::Emptied => Verdict::Emptied,
            EditKind::Broken => Verdict::Broken(row.message.clone().unwrap_or_default()),
            EditKind::Changed | EditKind::Reverted | EditKind::Returned if row.content.is_none() => {
                Verdict::Broken("it holds a secret in clear, which is not kept here".to_owned())
            }
            kind => {
                let elsewhere = kind == EditKind::Moved;
                let files = Files { document: Some(&content), secrets: None, elsewhere };
                verdict(&environment, &committed, named.as_ref(), files)
            }
        };
        Ok(Some(Case { row: row.clone(), verdict, committed, named, strays: Vec::new(), note: None, is_word: false }))
    }
}

/// Folder of a deployment in the repository.
pub(super) fn folder(cluster: &Cluster, row: &Deployment) -> Option<String> {
    let environment: EnvironmentId = row.environment_id.parse().ok()?;
    let deployment: DeploymentId = row.id.parse().ok()?;
    let shard = u32::try_from(row.shard).ok()?;
    Some(layout::below(&cluster.path, &layout::deployment_folder(&environment, shard, &deployment)))
}
