//! What is on the branch of a proposal, and what shall be.

use super::{Proposals, Result};
use crate::changes::{BranchEdit, Scene};
use crate::drivers::Catalog;
use crate::repository::{Content, Edits, Entry, Message, Mirror, Signature, Stamp, deployment_files, driver_files};
use anyhow::Context as _;
use git2::{Oid, Repository};
use std::collections::HashSet;
use std::sync::Arc;
use styrmin_renderer::{diff, layout};
use tokio::task::spawn_blocking;

/// Most other files that are named.
const OTHERS_MAX: usize = 20;
/// Up to how many deployments the commit message says what differs.
const DESCRIBED_MAX: usize = 50;

/// What a look at a branch found.
#[derive(Debug, Default)]
pub(super) struct Look {
    /// Files of the proposal that others committed to it.
    pub(super) commits: Vec<BranchEdit>,
    /// Its base changed a file of it: it cannot be merged as it is.
    pub(super) conflicts: bool,
    /// Other files that people changed on it: the first of them.
    pub(super) others: Vec<String>,
}

/// The files of each part.
fn paths(scene: &Scene) -> Vec<[String; 2]> {
    let files = [layout::DEPLOYMENT_FILE, layout::SECRETS_FILE];
    scene.parts.iter().map(|part| files.map(|file| format!("{}/{file}", part.folder))).collect()
}

/// Compares the branch with what was pushed there, and with its base.
pub(super) async fn look(mirror: &Mirror, scene: &Scene, base: Oid, head: Option<Oid>) -> Result<Look> {
    let Some(head) = head else { return Ok(Look::default()) };
    let paths = paths(scene);
    let documents: Vec<Option<String>> = scene.parts.iter().map(|part| part.instance.document.clone()).collect();
    let (copy, known) = (mirror.clone(), scene.proposal.head.clone());
    let found = spawn_blocking(move || {
        let repository = Repository::open_bare(copy.path())?;
        let fork = repository.merge_base(head, base).ok();
        let mut conflicts = false;
        let mut bases = Vec::with_capacity(paths.len());
        for (pair, document) in paths.iter().zip(&documents) {
            let same = copy.same(fork, Some(base), pair.iter())?;
            let at_base = copy.read(Some(base), &pair[..1])?.pop().flatten();
            conflicts |= !same && at_base != *document;
            bases.push(at_base);
        }
        let reading = match known.filter(|known| *known != head.to_string()) {
            Some(known) => {
                let below: Vec<String> = paths
                    .iter()
                    .filter_map(|[document, _]| document.rsplit_once('/'))
                    .map(|(folder, _)| folder.to_owned())
                    .collect();
                Some(copy.reading(&known, 0, head, &below)?)
            }
            None => None,
        };
        let others = match (fork, conflicts) {
            (Some(fork), true) => {
                let ours: HashSet<&String> = paths.iter().flatten().collect();
                let found = copy.reading(&fork.to_string(), 0, head, &[])?.findings;
                let is_other = |path: &String| {
                    !ours.contains(path) && !path.contains("cluster/drivers/") && !path.contains("charts/")
                };
                found.into_iter().map(|finding| finding.path).filter(is_other).take(OTHERS_MAX).collect()
            }
            _ => Vec::new(),
        };
        Ok::<_, git2::Error>((conflicts, reading, bases, others))
    });
    let (conflicts, reading, bases, others) = found.await.context("the branch could not be read")??;
    let mut look = Look { commits: Vec::new(), conflicts, others };
    let Some(reading) = reading else { return Ok(look) };
    for (part, at_base) in scene.parts.iter().zip(bases) {
        let path = format!("{}/{}", part.folder, layout::DEPLOYMENT_FILE);
        let Some(finding) = reading.findings.iter().find(|finding| finding.path == path) else { continue };
        let document = reading.contents(vec![path]).await?.pop().unwrap_or(Content::Absent);
        let same = match &document {
            Content::Absent => part.instance.document.is_none(),
            Content::Text(text) => part.instance.document.as_ref() == Some(text),
            Content::Other => false,
        };
        if !same {
            let commit = finding.commit.clone();
            let left_out = document.text() == at_base.as_deref() && document != Content::Other;
            look.commits.push(BranchEdit { deployment: part.deployment.id.clone(), document, left_out, commit });
        }
    }
    Ok(look)
}

/// Whether `head` comes after `tip`: its history has it, or it is so new that this copy does not know it.
pub(super) async fn is_later(mirror: &Mirror, head: Oid, tip: Oid) -> Result<bool> {
    let mirror = mirror.clone();
    let found = spawn_blocking(move || {
        let repository = Repository::open_bare(mirror.path())?;
        if repository.find_commit(head).is_err() {
            return Ok::<_, git2::Error>(true);
        }
        repository.graph_descendant_of(head, tip)
    });
    Ok(found.await.context("the history could not be read")??)
}

/// Whether the base holds something of the proposal.
pub(super) async fn is_merged(mirror: &Mirror, scene: &Scene, base: Oid) -> Result<bool> {
    let paths: Vec<String> = paths(scene).into_iter().map(|[document, _]| document).collect();
    let documents: Vec<Option<String>> = scene.parts.iter().map(|part| part.instance.document.clone()).collect();
    let mirror = mirror.clone();
    let read = spawn_blocking(move || mirror.read(Some(base), &paths));
    let found = read.await.context("the branch could not be read")??;
    Ok(found.iter().zip(&documents).any(|(found, document)| document.is_some() && found == document))
}

/// Whether a commit is in the history of `tip`. One that nobody names is.
pub(super) async fn contains(mirror: &Mirror, tip: Oid, commit: Option<&str>) -> Result<bool> {
    let Some(commit) = commit.and_then(|commit| Oid::from_str(commit).ok()) else { return Ok(true) };
    let mirror = mirror.clone();
    let found = spawn_blocking(move || mirror.in_history(tip, &[], &HashSet::from([commit])));
    Ok(!found.await.context("the history could not be read")??.is_empty())
}

/// The commit that brings the branch to what the proposal says, on `onto`; `None`: it says so already.
pub(super) async fn commit(
    proposals: &Proposals,
    mirror: &Mirror,
    scene: &Scene,
    onto: Oid,
    catalog: Arc<Catalog>,
) -> Result<Option<Oid>> {
    let mut edits = Edits::new();
    let mut message = Message::default();
    let mut drivers = HashSet::new();
    for part in &scene.parts {
        let instance = &part.instance;
        edits.extend(deployment_files(instance, &part.folder));
        let digest = &instance.spec.driver.digest;
        if instance.document.is_some()
            && drivers.insert(digest.clone())
            && let Some(driver) = catalog.by_digest.get(digest)
        {
            edits.extend(driver_files(driver, &scene.cluster.path)?);
        }
        // Every instance is named in one commit: what the branch has already is not.
        if part.item.pushed_instance_id.as_ref() == Some(&part.item.instance_id) {
            continue;
        }
        let before = match &part.item.base_instance_id {
            Some(id) if scene.parts.len() <= DESCRIBED_MAX => proposals.store.instance(id).await?,
            _ => None,
        };
        let changes = before.map(|old| diff::words(&old.spec, &instance.spec)).unwrap_or_default();
        message.entries.push(Entry { changes, ..Entry::of(instance, &part.deployment.name) });
    }
    let committer = proposals.settings.committer.clone();
    let author = message.single_author([]).map_or_else(
        || committer.clone(),
        |person| Signature { name: person.name.clone(), email: person.email.clone() },
    );
    let (mirror, signer, now) = (mirror.clone(), Arc::clone(&proposals.signer), proposals.clock.now());
    let made = spawn_blocking(move || {
        let text = message.text();
        let stamp = Stamp {
            message: &text,
            author: &author,
            committer: &committer,
            seconds: now.div_euclid(1000),
            signer: Some(&signer),
        };
        mirror.commit(Some(onto), &edits, false, &stamp)
    });
    Ok(made.await.context("the commit could not be made")??)
}
