//! Whether a repository can be reached and written, found out without writing anything.

use super::git;
use super::host::init;
use super::{GitError, Remote};
use anyhow::Context as _;
use git2::{Repository, Signature};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::task::spawn_blocking;

/// A branch that a push is tried to. Nothing is sent.
const BRANCH: &str = "refs/heads/styrmin/probe";

/// How long each of two commands may take: somebody waits for the answer.
const LIMIT: Duration = Duration::from_secs(20);

/// What was found.
#[derive(Debug)]
pub struct Probe {
    /// The branch's commit, when there is one; or why nobody knows.
    pub tip: Result<Option<String>, GitError>,
    /// Whether a push would be taken; means nothing when the branch could not be looked at.
    pub push: Result<(), GitError>,
}

/// Looks at `branch` of `remote`; `folder` holds what is needed for that.
///
/// # Errors
/// When the folder cannot be written.
pub async fn probe(remote: &Remote, branch: &str, folder: PathBuf, limit: Duration) -> anyhow::Result<Probe> {
    let place = folder.clone();
    let commit = spawn_blocking(move || nothing(&place)).await?;
    let commit = commit.with_context(|| format!("the folder {}", folder.display()))?;
    let reference = format!("refs/heads/{branch}");
    let look = ["ls-remote", "--", &remote.url, &reference];
    let limit = limit.min(LIMIT);
    let found = git::run(&folder, "looking at the branch", &look, &remote.access, limit).await;
    let tip = match found {
        Ok(lines) => Ok(lines.split_whitespace().next().map(str::to_owned)),
        // Nobody asks twice at a door that does not open.
        Err(error) => return Ok(Probe { tip: Err(error), push: Ok(()) }),
    };
    let to = format!("{commit}:{BRANCH}");
    let push = ["push", "--dry-run", "--quiet", "--", &remote.url, &to];
    let push = git::run(&folder, "trying a push", &push, &remote.access, limit).await.map(drop);
    Ok(Probe { tip, push })
}

/// A commit without a file, for a push needs one.
fn nothing(folder: &Path) -> Result<String, git2::Error> {
    let repository = match Repository::open_bare(folder) {
        Ok(repository) => repository,
        Err(_) => init(folder)?,
    };
    let tree = repository.find_tree(repository.treebuilder(None)?.write()?)?;
    let nobody = Signature::new("Styrmin", "styrmin@styrmin.invalid", &git2::Time::new(0, 0))?;
    Ok(repository.commit(None, &nobody, &nobody, "Probe", &tree, &[])?.to_string())
}
