//! Git as a person uses it, and what the tests read from a repository.

use crate::tools;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tokio::process::Command;

/// Runs git in `folder`; gives its output.
///
/// # Panics
/// When it fails.
pub async fn git(folder: &Path, arguments: &[&str]) -> String {
    String::from_utf8_lossy(&tools::run(&mut command(folder, arguments), b"").await).into_owned()
}

/// A git command as a person's.
#[must_use]
pub fn command(folder: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new("git");
    command
        .arg("-C")
        .arg(folder)
        .args(["-c", "user.name=Pat", "-c", "user.email=pat@example.com", "-c", "init.defaultBranch=main"])
        .args(arguments)
        .env("GIT_CONFIG_NOSYSTEM", "1")
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .env("GIT_TERMINAL_PROMPT", "0");
    command
}

/// Whether git did it.
pub async fn succeeds(folder: &Path, arguments: &[&str]) -> bool {
    let mut command = command(folder, arguments);
    let output = tokio::time::timeout(Duration::from_secs(60), command.kill_on_drop(true).output()).await;
    output.is_ok_and(|output| output.is_ok_and(|output| output.status.success()))
}

/// A bare repository with a branch `main` that has one file of a person.
pub async fn bare(folder: &Path) -> PathBuf {
    let path = folder.join("remote.git");
    git(folder, &["init", "--quiet", "--bare", path.to_str().unwrap()]).await;
    let work = folder.join("seed");
    git(folder, &["clone", "--quiet", path.to_str().unwrap(), work.to_str().unwrap()]).await;
    std::fs::write(work.join("NOTES.md"), "A person's notes.\n").unwrap();
    git(&work, &["add", "-A"]).await;
    git(&work, &["commit", "--quiet", "-m", "Notes"]).await;
    git(&work, &["push", "--quiet", "origin", "HEAD:main"]).await;
    path
}

/// Installs a hook in a bare repository.
pub fn hook(repository: &Path, name: &str, script: &str) {
    use std::os::unix::fs::PermissionsExt as _;
    let path = repository.join("hooks").join(name);
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
}

/// Every file at the tip of `main`, with its content.
pub async fn files(repository: &Path) -> BTreeMap<String, String> {
    let repository = git2::Repository::open(repository).unwrap();
    let tree = repository.find_reference("refs/heads/main").unwrap().peel_to_tree().unwrap();
    let mut found = BTreeMap::new();
    tree.walk(git2::TreeWalkMode::PreOrder, |folder, entry| {
        if entry.kind() == Some(git2::ObjectType::Blob) {
            let blob = repository.find_blob(entry.id()).unwrap();
            let path = format!("{folder}{}", entry.name().unwrap_or_default());
            found.insert(path, String::from_utf8_lossy(blob.content()).into_owned());
        }
        git2::TreeWalkResult::Ok
    })
    .unwrap();
    found
}

/// A commit of ours, as its trailers tell.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Named {
    /// The commit.
    pub commit: String,
    /// `Styrmin-Instance`.
    pub instance: String,
    /// `Styrmin-Deployment`.
    pub deployment: String,
    /// `Styrmin-Sequence`.
    pub sequence: i64,
    /// `Changed-By`.
    pub changed_by: String,
}

/// Every instance that the trailers of the whole history of `main` name, oldest first, as
/// `git interpret-trailers` understands them.
pub async fn named(repository: &Path) -> Vec<Named> {
    let format = "--format=commit %H%n%(trailers:only,unfold)";
    let text = git(repository, &["log", "--reverse", format, "main"]).await;
    let (mut found, mut commit, mut fields) = (Vec::new(), String::new(), HashMap::new());
    for line in text.lines() {
        if let Some(id) = line.strip_prefix("commit ") {
            commit = id.to_owned();
            continue;
        }
        let Some((key, value)) = line.split_once(": ") else { continue };
        fields.insert(key.to_owned(), value.to_owned());
        if key == "Changed-By" {
            let mut take = |key: &str| fields.remove(key).unwrap_or_default();
            found.push(Named {
                commit: commit.clone(),
                instance: take("Styrmin-Instance"),
                deployment: take("Styrmin-Deployment"),
                sequence: take("Styrmin-Sequence").parse().unwrap(),
                changed_by: take("Changed-By"),
            });
        }
    }
    found
}

/// Number of commits on `main`.
pub async fn commits(repository: &Path) -> usize {
    git(repository, &["rev-list", "--count", "main"]).await.trim().parse().unwrap()
}

/// A person who pushes a file of their own again and again to `main`, until told to stop.
pub struct Person {
    stop: tokio::sync::watch::Sender<bool>,
    task: tokio::task::JoinHandle<usize>,
}

impl Person {
    /// Begins to push to `repository`, with a pause between pushes.
    pub async fn start(folder: &Path, repository: &Path, pause: Duration) -> Self {
        let work = folder.join(format!("person-{}", rand::random::<u32>()));
        git(folder, &["clone", "--quiet", "-b", "main", repository.to_str().unwrap(), work.to_str().unwrap()]).await;
        let (stop, stopped) = tokio::sync::watch::channel(false);
        let task = tokio::spawn(async move {
            let mut pushed = 0;
            while !*stopped.borrow() {
                std::fs::write(work.join("person.txt"), format!("{}\n", pushed + 1)).unwrap();
                git(&work, &["add", "person.txt"]).await;
                git(&work, &["commit", "--quiet", "-m", &format!("Person {}", pushed + 1)]).await;
                loop {
                    let done = succeeds(&work, &["pull", "--quiet", "--rebase", "origin", "main"]).await
                        && succeeds(&work, &["push", "--quiet", "origin", "HEAD:main"]).await;
                    if done || *stopped.borrow() {
                        pushed += usize::from(done);
                        break;
                    }
                }
                tokio::time::sleep(pause).await;
            }
            pushed
        });
        Self { stop, task }
    }

    /// Stops; gives the number of pushes that landed.
    pub async fn finish(self) -> usize {
        self.stop.send(true).unwrap();
        self.task.await.unwrap()
    }
}
