//! The repositories that this server hosts itself: bare ones below its data folder, served over
//! smart HTTP by `git http-backend`. For one server replica.

use super::git;
use git2::{Repository, RepositoryInitOptions};
use std::path::{Path, PathBuf};
use tokio::process::Command;

/// The embedded host.
#[derive(Debug, Clone)]
pub struct Host {
    root: PathBuf,
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
            let mut options = RepositoryInitOptions::new();
            options.bare(true).initial_head("main").mkpath(true);
            Repository::init_opts(&path, &options)?;
        }
        Ok(path)
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
