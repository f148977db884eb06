//! A person with a clone of a cluster's repository.

use crate::git;
use crate::server::Server;
use serde_json::Value;
use std::path::{Path, PathBuf};
use styrmin_renderer::yaml;

/// A clone, over the server's own Git host or of a repository elsewhere.
pub struct Person {
    _folder: tempfile::TempDir,
    work: PathBuf,
}

impl Person {
    /// Clones the repository that the server hosts for a cluster, with the administrator's token.
    pub async fn over_http(server: &Server, cluster: &str) -> Self {
        let host = format!("127.0.0.1:{}", server.port());
        Self::of(&format!("http://ann:{}@{host}/git/{cluster}.git", server.token())).await
    }

    /// Clones a repository.
    pub async fn of(url: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        git::git(folder.path(), &["clone", "--quiet", "-b", "main", url, "work"]).await;
        let work = folder.path().join("work");
        Self { _folder: folder, work }
    }

    /// The work tree.
    #[must_use]
    pub fn work(&self) -> &Path {
        &self.work
    }

    /// Runs git in the work tree.
    pub async fn git(&self, arguments: &[&str]) -> String {
        git::git(&self.work, arguments).await
    }

    /// Gets what the branch has.
    pub async fn pull(&self) {
        self.git(&["fetch", "--quiet", "origin", "main"]).await;
        self.git(&["reset", "--quiet", "--hard", "origin/main"]).await;
    }

    /// Where a deployment's document lies, in the work tree.
    #[must_use]
    pub fn path(&self, deployment: &str) -> String {
        let listed = walk(&self.work, &self.work);
        let end = format!("{deployment}/styrmindeployment.yaml");
        listed.into_iter().find(|path| path.ends_with(&end)).unwrap_or_else(|| panic!("no {end}"))
    }

    /// Every file of the work tree.
    #[must_use]
    pub fn listed(&self) -> Vec<String> {
        let mut found = walk(&self.work, &self.work);
        found.sort();
        found
    }

    /// The text of a file.
    #[must_use]
    pub fn read(&self, path: &str) -> String {
        std::fs::read_to_string(self.work.join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
    }

    /// Writes a file.
    pub fn write(&self, path: &str, text: &str) {
        std::fs::write(self.work.join(path), text).unwrap();
    }

    /// Edits a deployment's document as a tree.
    pub fn edit(&self, deployment: &str, change: impl FnOnce(&mut Value)) {
        let path = self.path(deployment);
        let mut value: Value = yaml::from_str(&self.read(&path)).unwrap();
        change(&mut value);
        self.write(&path, &yaml::to_string(&value).unwrap());
    }

    /// Commits everything and pushes it; gives the commit.
    pub async fn push(&self, message: &str) -> String {
        self.git(&["add", "-A"]).await;
        self.git(&["commit", "--quiet", "--allow-empty", "-m", message]).await;
        while !git::succeeds(&self.work, &["push", "--quiet", "origin", "HEAD:main"]).await {
            self.git(&["pull", "--quiet", "--rebase", "origin", "main"]).await;
        }
        self.git(&["rev-parse", "HEAD"]).await.trim().to_owned()
    }
}

fn walk(root: &Path, folder: &Path) -> Vec<String> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let path = entry.path();
        if entry.file_name() == ".git" {
            continue;
        }
        if path.is_dir() {
            found.extend(walk(root, &path));
        } else {
            found.push(path.strip_prefix(root).unwrap().to_string_lossy().into_owned());
        }
    }
    found
}
