//! One program of a run: started, killed, frozen and started again at will, with its log.

use crate::child;
use rustix::process::{Pid, Signal, kill_process};
use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;
use tokio::process::Child;
use tokio::sync::Mutex;

/// How long a program may take to end after it was asked.
const STOP_LIMIT: Duration = Duration::from_secs(10);

/// How to run a program.
#[derive(Debug, Clone)]
pub struct Recipe {
    /// Its name, which is also its log's.
    pub name: String,
    /// The file.
    pub program: PathBuf,
    /// Arguments.
    pub arguments: Vec<String>,
    /// What its environment has besides PATH and HOME.
    pub environment: Vec<(String, String)>,
    /// Working folder.
    pub folder: PathBuf,
}

/// A program that can be run.
#[derive(Debug)]
pub struct Program {
    recipe: Recipe,
    log: PathBuf,
    child: Mutex<Option<Child>>,
}

impl Program {
    /// Starts it. It ends with this process.
    ///
    /// # Panics
    /// When it cannot be started.
    #[must_use]
    pub fn start(recipe: Recipe, logs: &Path) -> Self {
        let log = logs.join(format!("{}.log", recipe.name));
        let running = spawn(&recipe, &log);
        Self { recipe, log, child: Mutex::new(Some(running)) }
    }

    /// Its log.
    #[must_use]
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// The end of its log, for messages.
    #[must_use]
    pub fn log_tail(&self) -> String {
        let text = std::fs::read(&self.log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(15)..].join("\n")
    }

    /// Its process id while it runs.
    pub async fn id(&self) -> Option<u32> {
        let mut child = self.child.lock().await;
        let running = child.as_mut()?;
        running.try_wait().ok()?.is_none().then(|| running.id()).flatten()
    }

    /// Ends it with SIGKILL.
    pub async fn kill(&self) {
        if let Some(mut child) = self.child.lock().await.take() {
            let _ = child.kill().await;
        }
    }

    /// Asks it to end (SIGTERM), and ends it when it does not.
    pub async fn stop(&self) {
        let Some(mut child) = self.child.lock().await.take() else { return };
        signal(&child, Signal::TERM);
        if tokio::time::timeout(STOP_LIMIT, child.wait()).await.is_err() {
            let _ = child.kill().await;
        }
    }

    /// Starts it again after [`Self::kill`] or [`Self::stop`].
    pub async fn restart(&self) {
        let mut child = self.child.lock().await;
        assert!(child.is_none(), "{} runs already", self.recipe.name);
        *child = Some(spawn(&self.recipe, &self.log));
    }

    /// Stops it from doing anything, with its connections open (SIGSTOP).
    pub async fn freeze(&self) {
        self.send(Signal::STOP).await;
    }

    /// Lets it go on after [`Self::freeze`].
    pub async fn thaw(&self) {
        self.send(Signal::CONT).await;
    }

    async fn send(&self, what: Signal) {
        if let Some(child) = self.child.lock().await.as_ref() {
            signal(child, what);
        }
    }
}

fn signal(child: &Child, what: Signal) {
    let id = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
    if let Some(id) = id {
        let _ = kill_process(id, what);
    }
}

fn spawn(recipe: &Recipe, log: &Path) -> Child {
    let file: File = OpenOptions::new().create(true).append(true).open(log).unwrap();
    let keep = |name: &str| std::env::var_os(name).map(|value| (name.to_owned(), value));
    child(&recipe.program.to_string_lossy())
        .args(&recipe.arguments)
        .env_clear()
        .envs(["PATH", "HOME", "LANG"].into_iter().filter_map(keep))
        .envs(recipe.environment.iter().cloned())
        .current_dir(&recipe.folder)
        .stdin(Stdio::null())
        .stdout(file.try_clone().unwrap())
        .stderr(file)
        .spawn()
        .unwrap_or_else(|error| panic!("{}: {error}", recipe.name))
}
