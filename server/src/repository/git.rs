//! The `git` program as a hardened child process: the network half of Git.
//!
//! No terminal, no prompt, no configuration of the machine, no hooks, no credentials in arguments;
//! a time limit that ends the whole process group. What a person reads of a failure is git's own
//! last words without anything secret.

use super::access::{Access, Prepared};
use rustix::process::{Pid, Signal, kill_process_group};
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;
use tokio::io::AsyncReadExt as _;
use tokio::process::Command;

/// Most bytes kept of what git says.
const OUTPUT_MAX: u64 = 1 << 20;

/// First and last lines that people see of a longer output.
const LINES: usize = 4;

/// A remote repository and how to get in.
#[derive(Debug, Clone)]
pub struct Remote {
    /// URL or path, without credentials.
    pub url: String,
    /// What opens it.
    pub access: Access,
}

/// Why git did not do it.
#[derive(Debug, thiserror::Error)]
pub enum GitError {
    /// It took too long.
    #[error(
        "{what} did not answer within {} s; look whether the repository can be reached, or raise STYRMIN_GIT_TIMEOUT",
        limit.as_secs()
    )]
    Timeout {
        /// What was asked for.
        what: String,
        /// The limit.
        limit: Duration,
    },
    /// It said no.
    #[error("{what} failed: {message}")]
    Failed {
        /// What was asked for.
        what: String,
        /// git's last words.
        message: String,
        /// Exit code; `None` when it was ended by a signal.
        code: Option<i32>,
    },
    /// It could not be started or read.
    #[error("{what}: the git program could not be run: {error}")]
    Run {
        /// What was asked for.
        what: String,
        /// Why.
        error: std::io::Error,
    },
}

impl GitError {
    /// The cause in one word, for metrics.
    #[must_use]
    pub fn cause(&self) -> &'static str {
        match self {
            Self::Timeout { .. } => "timeout",
            Self::Failed { .. } => "refused",
            Self::Run { .. } => "run",
        }
    }
}

/// A git command without anything of the machine's configuration.
pub(super) fn command(directory: &Path) -> Command {
    let mut command = Command::new("git");
    command.env_clear();
    for name in [
        "PATH",
        "HOME",
        "SSH_AUTH_SOCK",
        "HTTPS_PROXY",
        "https_proxy",
        "HTTP_PROXY",
        "http_proxy",
        "NO_PROXY",
        "no_proxy",
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
        "TMPDIR",
    ] {
        if let Some(value) = std::env::var_os(name) {
            command.env(name, value);
        }
    }
    command
        .current_dir(directory)
        .env("LC_ALL", "C")
        .env("GIT_TERMINAL_PROMPT", "0")
        // Asked for a password, it has none: git then says that authentication failed.
        .env("GIT_ASKPASS", "true")
        .env("GIT_CONFIG_NOSYSTEM", "1")
        .env("GIT_CONFIG_GLOBAL", "/dev/null")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .kill_on_drop(true);
    command
}

/// Settings by environment, so that none shows in a process list.
fn configure(command: &mut Command, prepared: &Prepared) {
    let mut settings = vec![
        ("core.hooksPath".to_owned(), "/dev/null".to_owned()),
        ("gc.auto".to_owned(), "0".to_owned()),
        // The copies are set to look for no deltas when they write; what is sent may have them.
        ("core.bigFileThreshold".to_owned(), "512m".to_owned()),
        ("pack.deltaCacheSize".to_owned(), "256m".to_owned()),
        ("maintenance.auto".to_owned(), "false".to_owned()),
        ("protocol.ext.allow".to_owned(), "never".to_owned()),
        ("credential.helper".to_owned(), String::new()),
        // Our own and the embedded host's repositories may belong to another user in a container.
        ("safe.directory".to_owned(), "*".to_owned()),
        ("http.followRedirects".to_owned(), "false".to_owned()),
    ];
    settings.extend(prepared.settings.iter().map(|(key, value)| ((*key).to_owned(), value.clone())));
    command.env("GIT_SSH_COMMAND", &prepared.ssh);
    command.env("GIT_CONFIG_COUNT", settings.len().to_string());
    for (index, (key, value)) in settings.into_iter().enumerate() {
        command.env(format!("GIT_CONFIG_KEY_{index}"), key);
        command.env(format!("GIT_CONFIG_VALUE_{index}"), value);
    }
}

/// Runs git in `directory`; gives its standard output. `what` says for people what it is for.
///
/// # Errors
/// When it fails, takes longer than `limit`, or cannot be started.
pub(super) async fn run(
    directory: &Path,
    what: &str,
    arguments: &[&str],
    access: &Access,
    limit: Duration,
) -> Result<String, GitError> {
    let failed = |error| GitError::Run { what: what.to_owned(), error };
    // Beside the copy, in a folder that is the server's own.
    let (folder, access) = (directory.to_owned(), access.clone());
    let prepared = tokio::task::spawn_blocking(move || access.prepare(&folder)).await;
    let prepared = prepared.map_err(|error| failed(std::io::Error::other(error)))?.map_err(failed)?;
    let mut command = command(directory);
    configure(&mut command, &prepared);
    let mut child = command.args(arguments).spawn().map_err(failed)?;
    let group = child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw);
    let (mut out, mut err) = (Vec::new(), Vec::new());
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let work = async {
        let read_out = async {
            match stdout {
                Some(pipe) => pipe.take(OUTPUT_MAX).read_to_end(&mut out).await,
                None => Ok(0),
            }
        };
        let read_err = async {
            match stderr {
                Some(pipe) => pipe.take(OUTPUT_MAX).read_to_end(&mut err).await,
                None => Ok(0),
            }
        };
        tokio::try_join!(read_out, read_err)?;
        child.wait().await
    };
    let status = match tokio::time::timeout(limit, work).await {
        Ok(status) => status.map_err(failed)?,
        Err(_) => {
            // git's helpers (ssh, git-remote-https) would live on without it.
            if let Some(group) = group {
                let _ = kill_process_group(group, Signal::KILL);
            }
            return Err(GitError::Timeout { what: what.to_owned(), limit });
        }
    };
    if status.success() {
        return Ok(String::from_utf8_lossy(&out).into_owned());
    }
    Err(GitError::Failed {
        what: what.to_owned(),
        message: last_words(&String::from_utf8_lossy(&err), &String::from_utf8_lossy(&out)),
        code: status.code(),
    })
}

/// The lines of git's output that tell people something, in one line.
fn last_words(stderr: &str, stdout: &str) -> String {
    let noise = |line: &str| {
        line.is_empty()
            || line.starts_with("hint:")
            || line.starts_with("To ")
            || line.starts_with("Done")
            || line.starts_with("Please make sure you have the correct access rights")
            || line.starts_with("and the repository exists.")
    };
    let rejected = stdout.lines().filter(|line| line.starts_with('!')).map(|line| line.replace('\t', " "));
    let mut lines: Vec<String> = stderr.lines().map(str::trim).filter(|line| !noise(line)).map(str::to_owned).collect();
    lines.extend(rejected);
    lines.dedup();
    // The first lines say what it is about, the last ones how it ended.
    if lines.len() > 2 * LINES {
        lines.splice(LINES..lines.len() - LINES, ["…".to_owned()]);
    }
    let mut text = lines.join("; ");
    if text.contains("Authentication failed") {
        text.push_str("; are the Git credentials of the cluster right?");
    }
    if text.is_empty() { "git gave no reason".to_owned() } else { text.chars().take(1000).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_words_keep_what_the_remote_said() {
        let stderr = "remote: closed for maintenance\nhint: x\nerror: failed to push some refs to '/r'\n";
        let stdout = "To /r\n!\tHEAD:refs/heads/main\t[remote rejected] (pre-receive hook declined)\nDone\n";
        let words = last_words(stderr, stdout);
        assert!(words.contains("closed for maintenance") && words.contains("pre-receive hook declined"), "{words}");
        assert!(!words.contains("hint"));
    }

    #[tokio::test]
    async fn a_command_that_hangs_is_ended_with_its_children() {
        let folder = tempfile::tempdir().unwrap();
        let started = tokio::time::Instant::now();
        let error = run(
            folder.path(),
            "waiting",
            &["-c", "alias.x=!sleep 60", "x"],
            &Access::default(),
            Duration::from_millis(300),
        )
        .await
        .unwrap_err();
        assert!(matches!(error, GitError::Timeout { .. }), "{error}");
        assert!(started.elapsed() < Duration::from_secs(20));
    }
}
