//! Our bare copy of one remote repository: a cache that can be thrown away at any time.

use super::access::Access;
use super::git::{self, GitError, Remote};
use super::splice::{self, Edits, Stamp};
use git2::{Oid, Repository};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tracing::warn;

/// Where the remote's tip is kept.
const TIP: &str = "refs/styrmin/tip";
/// Where tips of branches that requests are for are kept, and those of the requests' own.
const BASES: &str = "refs/styrmin/bases/";
const HEADS: &str = "refs/styrmin/heads/";

/// The copy.
#[derive(Debug, Clone)]
pub struct Mirror {
    path: PathBuf,
    remote: Remote,
    branch: String,
    limit: Duration,
}

impl Mirror {
    /// Opens the copy at `path`, or begins a new one. Locks that a killed process left are removed:
    /// nobody else uses it.
    ///
    /// # Errors
    /// When the folder cannot be written.
    pub fn open(path: PathBuf, remote: Remote, branch: String, limit: Duration) -> anyhow::Result<Self> {
        if Repository::open_bare(&path).is_err() {
            if path.exists() {
                warn!(path = %path.display(), "the copy of a repository is damaged; it is fetched anew");
                std::fs::remove_dir_all(&path)?;
            }
            Repository::init_bare(&path)?;
        }
        // What an ended git was given to get in.
        for entry in std::fs::read_dir(&path)?.flatten() {
            if entry.file_name().to_string_lossy().starts_with("access-") {
                std::fs::remove_file(entry.path())?;
            }
        }
        remove_locks(&path.join("refs/styrmin"))?;
        for lock in
            ["HEAD.lock", "config.lock", "packed-refs.lock", "shallow.lock", "FETCH_HEAD.lock", "refs/styrmin/tip.lock"]
        {
            match std::fs::remove_file(path.join(lock)) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error.into()),
                _ => {}
            }
        }
        Ok(Self { path, remote, branch, limit })
    }

    /// The folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Uses other credentials or another spelling from now on.
    pub fn set_remote(&mut self, remote: Remote) {
        self.remote = remote;
    }

    async fn git(&self, what: &str, arguments: &[&str]) -> Result<String, GitError> {
        git::run(&self.path, what, arguments, &self.remote.access, self.limit).await
    }

    /// Fetches the branch; its tip, or `None` when it does not exist yet.
    ///
    /// # Errors
    /// When the remote does not answer or refuses.
    pub async fn fetch(&self) -> Result<Option<Oid>, GitError> {
        let from = format!("+refs/heads/{}:{TIP}", self.branch);
        let arguments = [
            "fetch",
            "--quiet",
            "--no-tags",
            "--no-write-fetch-head",
            "--no-auto-maintenance",
            &self.remote.url,
            &from,
        ];
        let Err(error) = self.git("fetching from the repository", &arguments).await else {
            return Ok(self.on_objects(|repository| repository.refname_to_id(TIP).ok()).await);
        };
        if !matches!(error, GitError::Failed { .. }) {
            return Err(error);
        }
        // A missing branch and a missing repository fail alike; only this tells them apart.
        let branch = format!("refs/heads/{}", self.branch);
        match self.git("looking at the repository", &["ls-remote", "--exit-code", &self.remote.url, &branch]).await {
            Err(GitError::Failed { code: Some(2), .. }) => {
                self.on_objects(|repository| repository.find_reference(TIP).and_then(|mut tip| tip.delete()).ok())
                    .await;
                Ok(None)
            }
            Ok(_) => Err(error),
            Err(error) => Err(error),
        }
    }

    /// Reads or writes the copy on a thread for blocking work.
    async fn on_objects<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Repository) -> Option<T> + Send + 'static,
    ) -> Option<T> {
        let path = self.path.clone();
        let done = tokio::task::spawn_blocking(move || work(&Repository::open_bare(path).ok()?));
        done.await.ok().flatten()
    }

    /// Asks the remote to move the branch to `commit`. Never forced. Its answer says nothing
    /// certain: fetch and look.
    ///
    /// # Errors
    /// When the remote does not answer or refuses.
    pub async fn push(&self, commit: Oid) -> Result<(), GitError> {
        let to = format!("{commit}:refs/heads/{}", self.branch);
        self.git("pushing to the repository", &["push", "--quiet", "--porcelain", "--no-verify", &self.remote.url, &to])
            .await
            .map(|_| ())
    }

    /// Fetches some branches and all below `prefix`: tips by name. One that is not there has none.
    ///
    /// # Errors
    /// When the remote does not answer or refuses.
    pub async fn fetch_branches(
        &self,
        names: &BTreeSet<String>,
        prefix: &str,
    ) -> Result<(BTreeMap<String, Oid>, BTreeMap<String, Oid>), GitError> {
        let listed = self.git("looking at the repository", &["ls-remote", "--heads", &self.remote.url]).await?;
        let there = |name: &str| listed.lines().any(|line| line.ends_with(&format!("\trefs/heads/{name}")));
        let mut specs: Vec<String> =
            names.iter().filter(|name| there(name)).map(|name| format!("+refs/heads/{name}:{BASES}{name}")).collect();
        specs.push(format!("+refs/heads/{prefix}*:{HEADS}{prefix}*"));
        let mut arguments =
            vec!["fetch", "--quiet", "--no-tags", "--no-write-fetch-head", "--no-auto-maintenance", "--prune"];
        arguments.push(&self.remote.url);
        arguments.extend(specs.iter().map(String::as_str));
        self.git("fetching from the repository", &arguments).await?;
        let read = |repository: &Repository| {
            let tips = |prefix: &str| {
                let mut found: BTreeMap<String, Oid> = BTreeMap::new();
                for reference in repository.references_glob(&format!("{prefix}*")).ok()?.flatten() {
                    let name = reference.name().ok().and_then(|name| name.strip_prefix(prefix)).map(str::to_owned);
                    found.extend(name.zip(reference.target()));
                }
                Some(found)
            };
            Some((tips(BASES)?, tips(HEADS)?))
        };
        let (mut bases, heads) = self.on_objects(read).await.unwrap_or_default();
        bases.retain(|name, _| there(name));
        Ok((bases, heads))
    }

    /// Asks the remote to move a branch that is ours alone to `commit`, if it still is at `expected` (`None`: not
    /// there).
    ///
    /// # Errors
    /// When the remote does not answer or refuses, or somebody moved it.
    pub async fn push_branch(&self, commit: Oid, branch: &str, expected: Option<Oid>) -> Result<(), GitError> {
        self.force(&commit.to_string(), branch, expected).await
    }

    /// Asks the remote to remove a branch that is ours alone, if it still is at `expected`.
    ///
    /// # Errors
    /// As [`Self::push_branch`].
    pub async fn delete_branch(&self, branch: &str, expected: Oid) -> Result<(), GitError> {
        self.force("", branch, Some(expected)).await
    }

    async fn force(&self, what: &str, branch: &str, expected: Option<Oid>) -> Result<(), GitError> {
        let expected = expected.map(|id| id.to_string()).unwrap_or_default();
        let lease = format!("--force-with-lease=refs/heads/{branch}:{expected}");
        let to = format!("{what}:refs/heads/{branch}");
        let arguments = ["push", "--quiet", "--porcelain", "--no-verify", &lease, &self.remote.url, &to];
        self.git("pushing for review", &arguments).await.map(drop)
    }

    /// Packs what lies around, when it is more than `most` objects, beside everything else: nothing is removed that may
    /// still be needed, and what is written meanwhile stays as it is. `false`: there was nothing to do.
    ///
    /// # Errors
    /// When git fails or takes longer than `limit`.
    pub async fn tidy(path: &Path, most: usize, limit: Duration) -> Result<bool, GitError> {
        let objects = path.join("objects");
        let loose = tokio::task::spawn_blocking(move || loose_objects(&objects)).await.unwrap_or_default();
        if loose <= most {
            return Ok(false);
        }
        // Left by one that was ended; nobody else packs what is ours.
        let _ = tokio::fs::remove_file(path.join("objects/maintenance.lock")).await;
        let arguments = [
            "maintenance",
            "run",
            "--quiet",
            "--task=loose-objects",
            "--task=incremental-repack",
            "--task=commit-graph",
        ];
        git::run(path, "packing the copy of the repository", &arguments, &Access::default(), limit).await?;
        Ok(true)
    }

    /// Which of `wanted` are in the history of `tip`, looking no further than `known`.
    ///
    /// # Errors
    /// When the history cannot be read.
    pub fn in_history(&self, tip: Oid, known: &[Oid], wanted: &HashSet<Oid>) -> Result<HashSet<Oid>, git2::Error> {
        let mut found = HashSet::new();
        if wanted.is_empty() {
            return Ok(found);
        }
        let repository = Repository::open_bare(&self.path)?;
        let mut walk = repository.revwalk()?;
        walk.push(tip)?;
        for id in known {
            // A commit that a rewound branch lost is not there; then the walk goes further.
            if repository.find_commit(*id).is_ok() {
                walk.hide(*id)?;
            }
        }
        for id in walk {
            let id = id?;
            if wanted.contains(&id) {
                found.insert(id);
                if found.len() == wanted.len() {
                    break;
                }
            }
        }
        Ok(found)
    }

    /// Reads files at `tip`; `None` for what is not there or is no text.
    ///
    /// # Errors
    /// When an object cannot be read.
    pub fn read(&self, tip: Option<Oid>, paths: &[String]) -> Result<Vec<Option<String>>, git2::Error> {
        let Some(tip) = tip else { return Ok(vec![None; paths.len()]) };
        let repository = Repository::open_bare(&self.path)?;
        let tree = repository.find_commit(tip)?.tree()?;
        paths
            .iter()
            .map(|path| match tree.get_path(Path::new(path)) {
                Ok(entry) => {
                    let object = entry.to_object(&repository)?;
                    Ok(object.as_blob().and_then(|blob| String::from_utf8(blob.content().to_vec()).ok()))
                }
                Err(error) if error.code() == git2::ErrorCode::NotFound => Ok(None),
                Err(error) => Err(error),
            })
            .collect()
    }

    /// Whether files are the same at two tips.
    ///
    /// # Errors
    /// When an object cannot be read.
    pub fn same<'a>(
        &self,
        one: Option<Oid>,
        other: Option<Oid>,
        paths: impl Iterator<Item = &'a String>,
    ) -> Result<bool, git2::Error> {
        let repository = Repository::open_bare(&self.path)?;
        let tree = |tip: Option<Oid>| tip.map(|id| repository.find_commit(id)?.tree()).transpose();
        let (one, other) = (tree(one)?, tree(other)?);
        for path in paths {
            let entry = |tree: &Option<git2::Tree<'_>>| match tree.as_ref().map(|tree| tree.get_path(Path::new(path))) {
                None => Ok(None),
                Some(Ok(entry)) => Ok(Some(entry.id())),
                Some(Err(error)) if error.code() == git2::ErrorCode::NotFound => Ok(None),
                Some(Err(error)) => Err(error),
            };
            if entry(&one)? != entry(&other)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// A commit of `edits` on `tip`; `None` when they change nothing, unless `anyway`.
    ///
    /// # Errors
    /// When an object cannot be read or written.
    pub fn commit(
        &self,
        tip: Option<Oid>,
        edits: &Edits,
        anyway: bool,
        stamp: &Stamp<'_>,
    ) -> Result<Option<Oid>, git2::Error> {
        let repository = Repository::open_bare(&self.path)?;
        let base = tip.map(|id| repository.find_commit(id)?.tree()).transpose()?;
        let tree = splice::splice(&repository, base.as_ref(), edits)?;
        if !anyway && base.as_ref().map(git2::Tree::id) == Some(tree) {
            return Ok(None);
        }
        splice::commit(&repository, tree, tip, stamp).map(Some)
    }
}

/// Removes what a git that was ended left beside our own references.
fn remove_locks(folder: &Path) -> std::io::Result<()> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Ok(()) };
    for entry in entries.flatten() {
        if entry.file_type()?.is_dir() {
            remove_locks(&entry.path())?;
        } else if entry.file_name().to_string_lossy().ends_with(".lock") {
            std::fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// About how many objects have a file each: names are spread evenly over 256 folders, so one tells, as git itself
/// estimates it.
fn loose_objects(objects: &Path) -> usize {
    std::fs::read_dir(objects.join("17")).map_or(0, |entries| entries.count() * 256)
}
