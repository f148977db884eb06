//! Settings of the agent: arguments, or environment variables of the same names.

use crate::operator::decide;
use clap::{Args, CommandFactory as _, Parser, Subcommand};
use std::path::PathBuf;
use std::time::Duration;
use styrmin_renderer::objects::ReleaseSettings;

/// The Styrmin agent: makes StyrminDeployments run in the cluster that it runs in, and reports to the
/// server.
#[derive(Debug, Parser)]
#[command(name = "styrmin-agent", version, subcommand_negates_reqs = true)]
pub struct Program {
    /// Absent when there is a command, which needs none of them.
    #[command(flatten)]
    pub settings: Option<Settings>,
    /// What to do instead.
    #[command(subcommand)]
    pub command: Option<Command>,
}

/// What the program can do instead of running.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Brings the kinds that the chart brings up to date, as its Job does before each install and upgrade.
    ApplyCrds {
        /// Folder with more kinds than the agent's own, one in each `.yaml` file.
        #[arg(long)]
        folder: Vec<PathBuf>,
    },
}

/// The arguments and commands, as the reference shows them.
#[must_use]
pub fn command() -> clap::Command {
    Program::command()
}

/// What the agent can be told.
#[derive(Debug, Clone, Args)]
pub struct Settings {
    /// Address of the Styrmin server.
    #[arg(long, env = "STYRMIN_SERVER_ADDRESS")]
    pub server_address: String,
    /// Token of this cluster's agent.
    #[arg(long, env = "STYRMIN_AGENT_TOKEN", hide_env_values = true, conflicts_with = "token_file")]
    pub token: Option<String>,
    /// File with the token; read again for every report, so that it can be replaced.
    #[arg(long, env = "STYRMIN_AGENT_TOKEN_FILE")]
    pub token_file: Option<PathBuf>,
    /// Name of this process among others, which gets a part of its own; by default the host's.
    #[arg(long, env = "STYRMIN_AGENT_IDENTITY")]
    pub identity: Option<String>,
    /// Longest time between two reports, in seconds.
    #[arg(long, env = "STYRMIN_REPORT_INTERVAL", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=300))]
    pub report_interval: u32,
    /// How long one install or upgrade may take, in seconds.
    #[arg(long, env = "STYRMIN_OPERATOR_HELM_RELEASE_TIMEOUT", default_value_t = 300, value_parser = clap::value_parser!(u32).range(1..=86400))]
    pub helm_release_timeout: u32,
    /// After how many seconds a rollout that is not ready is an error. Keep it below the one of the
    /// HelmRelease: then the pods that are not ready can still be named.
    #[arg(long, env = "STYRMIN_OPERATOR_DEPLOYMENT_READY_TIMEOUT", default_value_t = 270, value_parser = clap::value_parser!(u32).range(1..=86400))]
    pub deployment_ready_timeout: u32,
    /// Pause in seconds after a step that failed with a temporary error.
    #[arg(long, env = "STYRMIN_OPERATOR_RETRY_DELAY", default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub retry_delay: u32,
    /// How often every deployment is looked at although nothing happened, in seconds.
    #[arg(long, env = "STYRMIN_OPERATOR_TIMER", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub timer: u32,
    /// How often everything is listed anew, in seconds: what a watch has lost is seen then at the latest.
    #[arg(long, env = "STYRMIN_OPERATOR_RELIST", default_value_t = 600, value_parser = clap::value_parser!(u32).range(1..=86400))]
    pub relist: u32,
    /// How often Flux compares a release with the cluster, in seconds.
    #[arg(long, env = "STYRMIN_OPERATOR_HELM_RELEASE_INTERVAL", default_value_t = 60, value_parser = clap::value_parser!(u32).range(5..=86400))]
    pub helm_release_interval: u32,
    /// How long this agent leads without being heard of, in seconds: another one takes over after that.
    #[arg(long, env = "STYRMIN_LEASE_DURATION", default_value_t = 15, value_parser = clap::value_parser!(u32).range(3..=300))]
    pub lease_duration: u32,
    /// Where `/metrics` and `/healthz` are served, such as 0.0.0.0:9090; nowhere by default.
    #[arg(long, env = "STYRMIN_METRICS_LISTEN")]
    pub metrics_listen: Option<std::net::SocketAddr>,
    /// Log lines as JSON.
    #[arg(long, env = "STYRMIN_LOG_JSON")]
    pub log_json: bool,
}

impl Settings {
    /// What decisions depend on.
    #[must_use]
    pub fn decisions(&self) -> decide::Settings {
        decide::Settings {
            ready_timeout: self.deployment_ready_timeout,
            retry_delay: self.retry_delay,
            release: ReleaseSettings {
                timeout_seconds: self.helm_release_timeout,
                interval_seconds: self.helm_release_interval,
                ..ReleaseSettings::default()
            },
        }
    }

    /// The timer.
    #[must_use]
    pub fn timer(&self) -> Duration {
        Duration::from_secs(self.timer.into())
    }
}
