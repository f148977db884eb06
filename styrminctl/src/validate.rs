//! `styrminctl validate`: reads a checkout and what it is compared with, and prints what the renderer finds. It asks no
//! server.

use anyhow::{Context as _, bail};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;
use styrmin_renderer::checkout::{self, Files, Report};
use styrmin_renderer::driver::FileProblem;
use styrmin_renderer::layout::FOLDERS;
use tokio::process::Command;

/// Largest file, and most files, that are read.
const FILE_MAX: u64 = 2 << 20;
const FILES_MAX: usize = 500_000;
/// How long one git command may take.
const GIT_LIMIT: Duration = Duration::from_secs(120);

/// Checks the checkout in `folder`, below the cluster's `prefix`; `base` is a revision to compare with.
///
/// # Errors
/// When the folder or the revision cannot be read.
pub(crate) async fn check(folder: &Path, prefix: &str, base: Option<&str>) -> anyhow::Result<Report> {
    let root = folder.join(prefix);
    let root_again = root.clone();
    let files = tokio::task::spawn_blocking(move || read(&root_again)).await??;
    if files.is_empty() {
        bail!("{}: has none of the folders {}; is this a cluster's repository?", root.display(), FOLDERS.join(", "));
    }
    // What forges say of a branch that is new.
    let base = base.filter(|base| !base.chars().all(|c| c == '0'));
    let base = match base {
        None => None,
        Some(revision) => Some(base_of(&root, revision, &files).await?),
    };
    Ok(tokio::task::spawn_blocking(move || checkout::check(&files, base.as_ref())).await?)
}

/// A report for people; for programs as JSON.
pub(crate) fn shown(report: &Report) -> String {
    let mut lines = report.changes.clone();
    lines.extend(report.problems.iter().map(ToString::to_string));
    let problems = report.problems.len();
    lines.push(format!(
        "{} deployments, {problems} {}",
        report.deployments,
        if problems == 1 { "problem" } else { "problems" }
    ));
    lines.join("\n")
}

/// The same for programs.
pub(crate) fn value(report: &Report) -> serde_json::Value {
    let problem = |found: &FileProblem| json!({ "path": found.file, "line": found.line, "field": found.field, "message": found.message });
    let problems: Vec<serde_json::Value> = report.problems.iter().map(problem).collect();
    json!({ "deployments": report.deployments, "changes": report.changes, "problems": problems })
}

/// The files below `root` that are ours.
fn read(root: &Path) -> anyhow::Result<Files> {
    let mut found = BTreeMap::new();
    let mut folders: Vec<PathBuf> = FOLDERS.iter().map(|name| root.join(name)).filter(|path| path.is_dir()).collect();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).with_context(|| folder.display().to_string())? {
            let entry = entry?;
            let (path, kind) = (entry.path(), entry.file_type()?);
            if kind.is_dir() {
                folders.push(path);
                continue;
            }
            if !kind.is_file() || entry.metadata()?.len() > FILE_MAX {
                continue;
            }
            // What is no text is nothing that Styrmin wrote.
            let Ok(text) = String::from_utf8(std::fs::read(&path).with_context(|| path.display().to_string())?) else {
                continue;
            };
            let name = path.strip_prefix(root).map(|path| path.to_string_lossy().into_owned()).unwrap_or_default();
            found.insert(name, text);
            if found.len() > FILES_MAX {
                bail!("{}: has more than {FILES_MAX} files", root.display());
            }
        }
    }
    Ok(found)
}

/// The same files at a revision: only those that differ are read anew.
async fn base_of(root: &Path, revision: &str, files: &Files) -> anyhow::Result<Files> {
    if revision.starts_with('-') {
        bail!("--base: \"{revision}\" is no revision");
    }
    let mut base = files.clone();
    // In this order, git first says that the revision is none.
    let mut arguments = vec!["diff", "--name-only", "--no-renames", "--relative", "-z", revision, "--"];
    arguments.extend(FOLDERS);
    let changed = git(root, &arguments).await.with_context(|| format!("--base {revision}"))?;
    for path in String::from_utf8_lossy(&changed).split('\0').filter(|path| !path.is_empty()) {
        match git(root, &["show", &format!("{revision}:./{path}")]).await.map(String::from_utf8) {
            Ok(Ok(text)) => drop(base.insert(path.to_owned(), text)),
            // It was not there, or was no text.
            _ => drop(base.remove(path)),
        }
    }
    Ok(base)
}

async fn git(folder: &Path, arguments: &[&str]) -> anyhow::Result<Vec<u8>> {
    let mut command = Command::new("git");
    command.arg("-C").arg(folder).args(arguments).stdin(Stdio::null()).kill_on_drop(true).env("LC_ALL", "C");
    let output = tokio::time::timeout(GIT_LIMIT, command.output()).await.context("git did not answer")??;
    if !output.status.success() {
        bail!("git: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(output.stdout)
}
