//! What others did to our files: which of them differ between two commits, what they hold now, and who did it.
//!
//! It reads the copy of the repository and knows nothing of deployments. What our own commits changed is among what
//! it finds; who asks compares it with what was written.

use super::mirror::Mirror;
use crate::store::Lead;
use git2::{Commit, Delta, DiffOptions, ErrorCode, ObjectType, Oid, Repository, Sort, Tree};
use std::collections::{BTreeMap, BTreeSet};

/// Largest file that is read: a StyrminDeployment is smaller.
const FILE_MAX: usize = 2 << 20;
/// Most commits that are looked through for who changed a file.
const COMMITS_MAX: usize = 5_000;
/// Author of what came with a branch that somebody rewound: Git does not say who did that.
const REWOUND: &str = "unknown (the branch was rewound)";
/// Longest name and email that are taken from a commit.
const PERSON_MAX: usize = 200;

/// What a branch holds now that it did not hold when it was read before.
#[derive(Debug, Clone)]
pub struct Reading {
    /// The commit that it was read at before.
    pub base: String,
    /// Counts how often the branch was read.
    pub count: i64,
    /// The commit now.
    pub tip: Entry,
    /// The branch does not lead on from `base`.
    pub rewound: bool,
    /// `base` is not known any more: every file is listed, and what is gone is not.
    pub whole: bool,
    /// Files that differ, by path.
    pub findings: Vec<Finding>,
    /// Who reads: what follows is stored only while that one leads.
    pub lead: Option<Lead>,
    mirror: Mirror,
}

impl Reading {
    /// Names the reading: what was found in it is found once.
    #[must_use]
    pub fn name(&self) -> String {
        format!("{}: {}..{}", self.count, self.base, self.tip.id)
    }

    /// What files hold now. Read when it is needed: others may have committed whatever they like.
    ///
    /// # Errors
    /// When an object cannot be read.
    pub async fn contents(&self, paths: Vec<String>) -> anyhow::Result<Vec<Content>> {
        let (mirror, tip) = (self.mirror.path().to_owned(), self.tip.id.clone());
        let read = tokio::task::spawn_blocking(move || {
            let repository = Repository::open_bare(mirror)?;
            let tree = repository.find_commit(Oid::from_str(&tip)?)?.tree()?;
            paths.iter().map(|path| content(&repository, &tree, path)).collect::<Result<Vec<_>, git2::Error>>()
        });
        Ok(read.await??)
    }
}

/// One file that differs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// Its path in the repository.
    pub path: String,
    /// Git's id of what it holds now; `None`: it is not there.
    pub blob: Option<String>,
    /// The commit that did it, as far as can be told.
    pub commit: Entry,
}

/// What a file holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content {
    /// It is not there.
    Absent,
    /// Text.
    Text(String),
    /// Too large, no text, or no file.
    Other,
}

impl Finding {
    /// Whether the file holds this text.
    #[must_use]
    pub fn holds(&self, text: &str) -> bool {
        let id = Oid::hash_object(ObjectType::Blob, text.as_bytes());
        id.is_ok_and(|id| self.blob.as_deref() == Some(id.to_string().as_str()))
    }
}

impl Content {
    /// The text, if it is one.
    #[must_use]
    pub fn text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            Self::Absent | Self::Other => None,
        }
    }
}

/// One commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Its id.
    pub id: String,
    /// Its author's name; never empty, in one line.
    pub name: String,
    /// Its author's email.
    pub email: String,
}

impl Entry {
    fn of(commit: &Commit<'_>) -> Self {
        let author = commit.author();
        let usable = |name: &str, email: &str| git2::Signature::new(name, email, &git2::Time::new(0, 0)).is_ok();
        let clean = |bytes: &[u8]| {
            let text: String = String::from_utf8_lossy(bytes)
                .chars()
                .filter(|c| !c.is_control() && !matches!(c, '<' | '>'))
                .take(PERSON_MAX)
                .collect();
            let text = text.trim().to_owned();
            if text.is_empty() { "unknown".to_owned() } else { text }
        };
        let (mut name, mut email) = (clean(author.name_bytes()), clean(author.email_bytes()));
        // Other programs write names that Git itself would not, and refuses.
        if !usable(&name, "a@b") {
            "unknown".clone_into(&mut name);
        }
        if !usable("a", &email) {
            "unknown".clone_into(&mut email);
        }
        Self { id: commit.id().to_string(), name, email }
    }

    /// Nobody's commit brought the branch here.
    fn rewound(tip: &Self) -> Self {
        Self { id: tip.id.clone(), name: REWOUND.to_owned(), email: "unknown".to_owned() }
    }
}

impl Mirror {
    /// What differs at `tip` from `base` in the folders `below` (`""`: everywhere), without the branch's own
    /// texts for people.
    ///
    /// # Errors
    /// When an object cannot be read.
    pub fn reading(&self, base: &str, count: i64, tip: Oid, below: &[String]) -> Result<Reading, git2::Error> {
        let repository = Repository::open_bare(self.path())?;
        let end = repository.find_commit(tip)?;
        let tree = end.tree()?;
        let begin = Oid::from_str(base).and_then(|id| repository.find_commit(id));
        let begin = match begin {
            Ok(commit) => Some(commit),
            Err(error) if matches!(error.code(), ErrorCode::NotFound) => None,
            Err(error) => return Err(error),
        };
        let leads_on = match &begin {
            Some(commit) => tip == commit.id() || repository.graph_descendant_of(tip, commit.id())?,
            None => false,
        };
        let before = begin.as_ref().map(Commit::tree).transpose()?;
        let paths = differing(&repository, before.as_ref(), &tree, below)?;
        let authors = attribute(&repository, begin.as_ref().map(Commit::id), tip, below, &paths)?;
        let tip = Entry::of(&end);
        let nobody = if leads_on { tip.clone() } else { Entry::rewound(&tip) };
        let findings = paths
            .into_iter()
            .map(|path| {
                let blob = match tree.get_path(std::path::Path::new(&path)) {
                    Ok(entry) => Some(entry.id().to_string()),
                    Err(error) if error.code() == ErrorCode::NotFound => None,
                    Err(error) => return Err(error),
                };
                let commit = authors.get(&path).unwrap_or(&nobody).clone();
                Ok(Finding { path, blob, commit })
            })
            .collect::<Result<_, git2::Error>>()?;
        Ok(Reading {
            base: base.to_owned(),
            count,
            tip,
            rewound: !leads_on,
            whole: begin.is_none(),
            findings,
            lead: None,
            mirror: self.clone(),
        })
    }
}

fn options(below: &[String]) -> DiffOptions {
    let mut options = DiffOptions::new();
    options.disable_pathspec_match(true).skip_binary_check(true).context_lines(0);
    for folder in below.iter().filter(|folder| !folder.is_empty()) {
        options.pathspec(folder);
    }
    options
}

fn differing(
    repository: &Repository,
    before: Option<&Tree<'_>>,
    after: &Tree<'_>,
    below: &[String],
) -> Result<BTreeSet<String>, git2::Error> {
    let diff = repository.diff_tree_to_tree(before, Some(after), Some(&mut options(below)))?;
    let mut paths = BTreeSet::new();
    for delta in diff.deltas() {
        let file = if delta.status() == Delta::Deleted { delta.old_file() } else { delta.new_file() };
        // A path that is no text is nothing that we wrote.
        paths.extend(file.path().and_then(|path| path.to_str()).map(str::to_owned));
    }
    Ok(paths)
}

/// The newest commit that touched each path; merges count only for what none of the merged commits explains.
fn attribute(
    repository: &Repository,
    base: Option<Oid>,
    tip: Oid,
    below: &[String],
    paths: &BTreeSet<String>,
) -> Result<BTreeMap<String, Entry>, git2::Error> {
    let mut found = BTreeMap::new();
    let mut merged = BTreeMap::new();
    if paths.is_empty() {
        return Ok(found);
    }
    let mut walk = repository.revwalk()?;
    walk.set_sorting(Sort::TOPOLOGICAL)?;
    walk.push(tip)?;
    if let Some(base) = base {
        walk.hide(base)?;
    }
    for id in walk.take(COMMITS_MAX) {
        if found.len() == paths.len() {
            break;
        }
        let commit = repository.find_commit(id?)?;
        let parent = commit.parents().next().map(|parent| parent.tree()).transpose()?;
        let into = if commit.parent_count() > 1 { &mut merged } else { &mut found };
        for path in differing(repository, parent.as_ref(), &commit.tree()?, below)? {
            if paths.contains(&path) {
                into.entry(path).or_insert_with(|| Entry::of(&commit));
            }
        }
    }
    for (path, entry) in merged {
        found.entry(path).or_insert(entry);
    }
    Ok(found)
}

fn content(repository: &Repository, tree: &Tree<'_>, path: &str) -> Result<Content, git2::Error> {
    let entry = match tree.get_path(std::path::Path::new(path)) {
        Ok(entry) => entry,
        Err(error) if error.code() == ErrorCode::NotFound => return Ok(Content::Absent),
        Err(error) => return Err(error),
    };
    if entry.kind() != Some(ObjectType::Blob) || entry.filemode() == i32::from(git2::FileMode::Link) {
        return Ok(Content::Other);
    }
    let blob = repository.find_blob(entry.id())?;
    if blob.size() > FILE_MAX {
        return Ok(Content::Other);
    }
    let text = String::from_utf8(blob.content().to_vec()).ok().filter(|text| !text.contains('\0'));
    Ok(text.map_or(Content::Other, Content::Text))
}
