//! The repositories that this server hosts itself: bare ones below its data folder, served over
//! smart HTTP by `git http-backend`. For one server replica.

use super::{Access, Remote, git};
use crate::store::Cluster;
use anyhow::Context as _;
use git2::{Repository, RepositoryInitOptions};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::process::Command;
use tokio::task::spawn_blocking;

/// How long the copy of one repository may take.
const COPY_LIMIT: Duration = Duration::from_secs(3600);

/// The embedded host.
#[derive(Debug, Clone)]
pub struct Host {
    root: PathBuf,
}

/// A new bare repository.
pub(super) fn init(path: &Path) -> Result<Repository, git2::Error> {
    let mut options = RepositoryInitOptions::new();
    options.bare(true).initial_head("main").mkpath(true);
    Repository::init_opts(path, &options)
}

impl Host {
    /// Hosts below `root`.
    #[must_use]
    pub fn new(root: PathBuf) -> Self {
        Self { root }
    }

    /// The repository of a cluster.
    #[must_use]
    pub fn path(&self, cluster: &str) -> PathBuf {
        self.root.join(format!("{cluster}.git"))
    }

    /// The commit that a branch of it has.
    #[must_use]
    pub fn tip(&self, cluster: &str, branch: &str) -> Option<git2::Oid> {
        let repository = Repository::open_bare(self.path(cluster)).ok()?;
        repository.refname_to_id(&format!("refs/heads/{branch}")).ok()
    }

    /// Makes the repository of a cluster when it is not there.
    ///
    /// # Errors
    /// When the folder cannot be written.
    pub fn ensure(&self, cluster: &str) -> Result<PathBuf, git2::Error> {
        let path = self.path(cluster);
        if Repository::open_bare(&path).is_err() {
            init(&path)?;
        }
        Ok(path)
    }

    /// Where a cluster's repository is reached, hosted here or elsewhere; `access` opens one elsewhere.
    ///
    /// # Errors
    /// When a hosted one cannot be made.
    pub async fn remote(&self, cluster: &Cluster, access: Access) -> anyhow::Result<Remote> {
        if let Some(url) = &cluster.git_url {
            return Ok(Remote { url: url.clone(), access });
        }
        let (host, id) = (self.clone(), cluster.id.clone());
        let path = spawn_blocking(move || host.ensure(&id)).await.context("embedded repository")??;
        Ok(Remote { url: path.to_string_lossy().into_owned(), access: Access::default() })
    }

    /// Copies every hosted repository into a folder, while people and the server push; gives how many there are.
    ///
    /// # Errors
    /// When one cannot be read or written.
    pub async fn copy_all(&self, to: &Path) -> anyhow::Result<usize> {
        let what = || format!("the folder of hosted repositories {}", self.root.display());
        let mut entries = match tokio::fs::read_dir(&self.root).await {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(0),
            entries => entries.with_context(what)?,
        };
        let mut copied = 0;
        while let Some(entry) = entries.next_entry().await.with_context(what)? {
            let (from, name) = (entry.path(), entry.file_name());
            let copy = to.join(&name);
            if from.extension().is_none_or(|extension| extension != "git") {
                continue;
            }
            let (made, what) = (copy.clone(), format!("copying {}", from.display()));
            spawn_blocking(move || init(&made).map(drop)).await?.context(what.clone())?;
            let source = from.to_string_lossy();
            let fetch = ["fetch", "--quiet", "--no-tags", &source, "+refs/*:refs/*"];
            git::run(&copy, &what, &fetch, &Access::default(), COPY_LIMIT).await?;
            copied += 1;
        }
        Ok(copied)
    }

    /// `git http-backend` for a request below `/<cluster>.git`. The caller has checked who asks.
    #[must_use]
    pub fn backend(&self, cluster: &str, rest: &str) -> Command {
        let mut command = git::command(Path::new(&self.root));
        command
            .arg("http-backend")
            .env("GIT_PROJECT_ROOT", &self.root)
            .env("GIT_HTTP_EXPORT_ALL", "1")
            .env("PATH_INFO", format!("/{cluster}.git/{rest}"))
            // Commits stay reachable: no gc, no branch is rewound from outside, and that which Flux follows is not
            // deleted. Branches of reviews may be: that is a no.
            .env("GIT_CONFIG_COUNT", "6")
            .env("GIT_CONFIG_KEY_0", "http.receivepack")
            .env("GIT_CONFIG_VALUE_0", "true")
            .env("GIT_CONFIG_KEY_1", "safe.directory")
            .env("GIT_CONFIG_VALUE_1", "*")
            .env("GIT_CONFIG_KEY_2", "gc.auto")
            .env("GIT_CONFIG_VALUE_2", "0")
            .env("GIT_CONFIG_KEY_3", "receive.autogc")
            .env("GIT_CONFIG_VALUE_3", "false")
            .env("GIT_CONFIG_KEY_4", "receive.denyNonFastForwards")
            .env("GIT_CONFIG_VALUE_4", "true")
            .env("GIT_CONFIG_KEY_5", "receive.denyDeleteCurrent")
            .env("GIT_CONFIG_VALUE_5", "refuse");
        command
    }
}
