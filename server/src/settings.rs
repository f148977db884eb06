//! Settings of the server: arguments, or environment variables of the same names.

use crate::auth::check_person;
use crate::repository::{Signature, WriterSettings};
use crate::store::Person;
use anyhow::bail;
use clap::{Args, CommandFactory as _, Parser, Subcommand};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// The Styrmin server: takes changes of deployments, commits them to the repositories of clusters, and shows where
/// each of them stands.
#[derive(Debug, Parser)]
#[command(name = "styrmin-server", version)]
pub struct Program {
    /// How it runs.
    #[command(flatten)]
    pub settings: Settings,
    /// What to do instead.
    #[command(subcommand)]
    pub command: Option<Command>,
}

/// What the program can do instead of running.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Makes the keys of an installation: secret-key, signing-key and admin-token. Those that are there stay.
    Keys {
        /// Folder for them; kubectl create secret generic NAME --from-file=FOLDER makes a Secret of it.
        #[arg(long)]
        to: PathBuf,
    },
    /// Copies the database (SQLite), the hosted repositories and the keys of the data folder, while the server runs.
    Backup {
        /// Folder for the copy, which replaces an earlier one. Used as --data it is a server again.
        #[arg(long)]
        to: PathBuf,
    },
}

/// The arguments and commands, as the reference shows them.
#[must_use]
pub fn command() -> clap::Command {
    Program::command()
}

/// What the server can be told.
#[derive(Debug, Clone, Args)]
pub struct Settings {
    /// Address to listen on; port 0 takes a free one.
    #[arg(long, env = "STYRMIN_LISTEN", default_value = "127.0.0.1:8080")]
    pub listen: SocketAddr,
    /// URL of this server, as people, agents and Flux reach it (default: from --listen).
    #[arg(long, env = "STYRMIN_PUBLIC_URL")]
    pub public_url: Option<String>,
    /// Folder for the database, keys, hosted repositories and copies of others.
    #[arg(long, env = "STYRMIN_DATA", default_value = "data")]
    pub data: PathBuf,
    /// sqlite:PATH or postgres://… (default: SQLite in the data folder).
    #[arg(long, env = "STYRMIN_DATABASE_URL", hide_env_values = true)]
    pub database_url: Option<String>,
    /// Folder with the drivers.
    #[arg(long, env = "STYRMIN_DRIVERS", default_value = "drivers")]
    pub drivers: PathBuf,
    /// Key for secrets at rest, 32 bytes as base64 (default: the file server.key in the data folder,
    /// made at the first start).
    #[arg(long, env = "STYRMIN_SECRET_KEY", hide_env_values = true)]
    pub secret_key: Option<String>,
    /// File with the SSH key that signs commits: an OpenSSH private key of the kind Ed25519 without a passphrase
    /// (default: signing.key in the data folder, made at the first start).
    #[arg(long, env = "STYRMIN_SIGNING_KEY")]
    pub signing_key: Option<PathBuf>,
    /// File with the token of the first administrator, as `styrmin-server keys` makes one; read at each start, so
    /// that another one can be added (default: admin-token in the data folder, made at the first start).
    #[arg(long, env = "STYRMIN_ADMIN_TOKEN_FILE")]
    pub admin_token_file: Option<PathBuf>,
    /// Name on the first administrator's token.
    #[arg(long, env = "STYRMIN_ADMIN_NAME", default_value = "Administrator")]
    pub admin_name: String,
    /// Email on the first administrator's token.
    #[arg(long, env = "STYRMIN_ADMIN_EMAIL", default_value = "admin@styrmin.invalid")]
    pub admin_email: String,
    /// Name of the committer.
    #[arg(long, env = "STYRMIN_COMMITTER_NAME", default_value = "Styrmin")]
    pub committer_name: String,
    /// Email of the committer.
    #[arg(long, env = "STYRMIN_COMMITTER_EMAIL", default_value = "styrmin@styrmin.invalid")]
    pub committer_email: String,
    /// Seconds that one Git command may take.
    #[arg(long, env = "STYRMIN_GIT_TIMEOUT", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub git_timeout: u64,
    /// Seconds after which a repository elsewhere is looked at for what people committed, when no agent has reported a
    /// commit that is not known.
    #[arg(long, env = "STYRMIN_GIT_POLL", default_value_t = 300, value_parser = clap::value_parser!(u64).range(1..=86400))]
    pub git_poll: u64,
    /// From how many objects on, each in a file of its own, a copy or hosted repository is packed, beside everything
    /// else.
    #[arg(long, env = "STYRMIN_GIT_LOOSE_OBJECTS", default_value_t = 6700)]
    pub git_loose_objects: usize,
    /// Seconds after which requests under review are looked at, when no webhook has told of something.
    #[arg(long, env = "STYRMIN_FORGE_POLL", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=86400))]
    pub forge_poll: u64,
    /// Longest pause in seconds between attempts to reach a repository.
    #[arg(long, env = "STYRMIN_GIT_RETRY_MAX", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub git_retry_max: u64,
    /// Days that ended tasks, their instances and what was observed are kept; 0: for ever. What runs and the newest
    /// 20 instances of each deployment stay in any case.
    #[arg(long, env = "STYRMIN_RETENTION_DAYS", default_value_t = 365, value_parser = clap::value_parser!(u32).range(0..=36500))]
    pub retention_days: u32,
    /// Where `/metrics` is served without a token, such as 0.0.0.0:9090; nowhere by default. (At --listen it needs an
    /// administrator's.)
    #[arg(long, env = "STYRMIN_METRICS_LISTEN")]
    pub metrics_listen: Option<SocketAddr>,
    /// Log lines as JSON.
    #[arg(long, env = "STYRMIN_LOG_JSON")]
    pub log_json: bool,
}

impl Settings {
    /// Checks what clap cannot.
    ///
    /// # Errors
    /// Names the setting.
    pub fn check(&self) -> anyhow::Result<()> {
        for (setting, name, email) in
            [("admin", &self.admin_name, &self.admin_email), ("committer", &self.committer_name, &self.committer_email)]
        {
            if let Err((field, message)) = check_person(name, email) {
                bail!("setting --{setting}-{field}: {message}");
            }
        }
        Ok(())
    }

    /// The person of the first token.
    #[must_use]
    pub fn administrator(&self) -> Person {
        Person { name: self.admin_name.clone(), email: self.admin_email.clone() }
    }

    /// The database.
    #[must_use]
    pub fn database(&self) -> String {
        self.database_url.clone().unwrap_or_else(|| format!("sqlite:{}", self.data.join("styrmin.db").display()))
    }

    /// Settings of the repository writers; `address` is where the server listens.
    #[must_use]
    pub fn writers(&self, address: SocketAddr) -> WriterSettings {
        WriterSettings {
            mirrors: self.data.join("mirrors"),
            public_url: self.public_url.clone().unwrap_or_else(|| format!("http://{address}")),
            git_limit: Duration::from_secs(self.git_timeout),
            poll: Duration::from_secs(self.git_poll),
            loose_objects: self.git_loose_objects,
            retry_first: Duration::from_millis(500),
            retry_most: Duration::from_secs(self.git_retry_max),
            committer: Signature { name: self.committer_name.clone(), email: self.committer_email.clone() },
        }
    }
}
