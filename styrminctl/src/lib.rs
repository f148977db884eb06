//! The program `styrminctl`: Styrmin on the command line. Thin: every command is one call of the
//! API; whatever it can do, others can do too.

mod apply;
mod bootstrap;
mod doctor;
mod validate;

use anyhow::{Context as _, bail};
use clap::{Args, CommandFactory as _, Parser, Subcommand, ValueEnum};
use serde_json::{Map, Value, json};
use std::io::Write as _;
use std::path::PathBuf;
use std::time::Duration;
use styrmin_client::{Client, FanOutProgress, TaskProgress};
use styrmin_renderer::yaml;
use tabled::builder::Builder;
use tabled::settings::Style;

#[derive(Debug, Parser)]
#[command(name = "styrminctl", version, about = "Styrmin on the command line")]
struct Cli {
    /// Address of the server.
    #[arg(long, env = "STYRMIN_SERVER_ADDRESS", default_value = "http://127.0.0.1:8080", global = true)]
    server: String,
    /// Your token.
    #[arg(long, env = "STYRMIN_TOKEN", hide_env_values = true, global = true)]
    token: Option<String>,
    /// File with your token.
    #[arg(long, env = "STYRMIN_TOKEN_FILE", global = true)]
    token_file: Option<PathBuf>,
    /// How to print.
    #[arg(long, short, value_enum, default_value_t = Output::Table, global = true)]
    output: Output,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Output {
    Table,
    Json,
    Yaml,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Kubernetes clusters and their repositories.
    #[command(subcommand)]
    Clusters(Box<Clusters>),
    /// Groups of deployments.
    #[command(subcommand)]
    Environments(Environments),
    /// What runs where.
    #[command(subcommand)]
    Deployments(Deployments),
    /// Changes on their way.
    #[command(subcommand)]
    Tasks(Tasks),
    /// Configurations of clusters and environments on their way to the deployments.
    #[command(subcommand)]
    FanOuts(FanOuts),
    /// What people change in the clusters' repositories by hand.
    #[command(subcommand)]
    Edits(Edits),
    /// Changes that people review before they count.
    #[command(subcommand)]
    Proposals(Proposals),
    /// Checks a checkout of a cluster's repository, without a server; fails when something would break.
    Validate {
        /// The checkout.
        folder: PathBuf,
        /// Folder of the cluster in it.
        #[arg(long, default_value = "")]
        path: String,
        /// Revision to compare with: what differs is said in words.
        #[arg(long)]
        base: Option<String>,
    },
}

#[derive(Debug, Subcommand)]
enum Clusters {
    /// Adds a cluster; prints its agent's token, which is shown this once.
    Create(CreateArgs),
    /// Adds a cluster with everything that it needs, into a folder: its age key, its agent's token, values for the
    /// agent's chart, and what to apply. The same once more changes nothing.
    Bootstrap(bootstrap::BootstrapArgs),
    /// Has Flux upgrade a cluster's agent: commits this server's chart of it with a release to the cluster's repository.
    Agent {
        /// Id or name of the cluster.
        id: String,
        /// File with the values of the chart, as bootstrap makes one (default: those of the last time).
        #[arg(long)]
        values: Option<PathBuf>,
    },
    /// Checks every link between the server and a cluster, and says what to do; fails when one is broken.
    Doctor {
        /// Id or name of the cluster.
        id: String,
        /// Seconds to wait until all hold.
        #[arg(long, default_value_t = 0)]
        wait: u64,
    },
    /// Changes a cluster's configuration, and with it the deployments that take values from it.
    Update {
        id: String,
        #[command(flatten)]
        patch: PatchArgs,
        /// age recipient that secrets are encrypted for; several while a key is replaced.
        #[arg(long)]
        age_recipient: Vec<String>,
        #[command(flatten)]
        edits: EditArgs,
        #[command(flatten)]
        access: AccessArgs,
        #[command(flatten)]
        forge: ForgeArgs,
        #[command(flatten)]
        rules: RulesArgs,
        #[command(flatten)]
        wait: FanOutArgs,
    },
    /// Shows one cluster, or all.
    Get { id: Option<String> },
}

/// A new cluster.
#[derive(Debug, Clone, Args)]
struct CreateArgs {
    name: String,
    /// Configuration, as JSON or YAML.
    #[arg(long, short)]
    config: Option<String>,
    /// URL of its repository; hosted by the server when absent.
    #[arg(long)]
    git_url: Option<String>,
    /// Branch that Flux follows.
    #[arg(long, requires = "git_url")]
    git_branch: Option<String>,
    /// Folder of the cluster in the repository.
    #[arg(long, requires = "git_url")]
    git_path: Option<String>,
    #[command(flatten)]
    access: AccessArgs,
    #[command(flatten)]
    forge: ForgeArgs,
    #[command(flatten)]
    rules: RulesArgs,
    /// age recipient that secrets are encrypted for; several while a key is replaced.
    #[arg(long)]
    age_recipient: Vec<String>,
    #[command(flatten)]
    edits: EditArgs,
    /// Has Flux accept only commits that are signed with the server's key or a trusted one.
    #[arg(long)]
    verify: bool,
    /// File with a public key of somebody else whose commits Flux shall accept: people's, and the forge's.
    #[arg(long, requires = "verify")]
    trusted_key: Vec<PathBuf>,
}

impl CreateArgs {
    /// What opens its repository.
    async fn access(&self) -> anyhow::Result<Option<Map<String, Value>>> {
        self.access.clone().input().await
    }

    /// Adds the cluster; gives the answer.
    async fn send(self, client: &Client) -> anyhow::Result<Value> {
        let mut keys = Vec::new();
        for path in &self.trusted_key {
            let text = tokio::fs::read_to_string(path).await;
            keys.push(text.with_context(|| format!("trusted key {}", path.display()))?.trim().to_owned());
        }
        let verification = self.verify.then(|| json!({ "trustedKeys": keys }));
        let git = match self.git_url {
            None => None,
            Some(url) => {
                let mut git = self.access.input().await?.unwrap_or_default();
                git.extend([
                    ("url".to_owned(), url.into()),
                    ("branch".to_owned(), self.git_branch.into()),
                    ("path".to_owned(), self.git_path.into()),
                    ("forge".to_owned(), self.forge.input().into()),
                ]);
                Some(git)
            }
        };
        let input = json!({ "name": self.name, "config": object(self.config)?, "git": git, "ageRecipients": self.age_recipient, "edits": self.edits.input(), "verification": verification, "delivery": self.rules.input() });
        let query = format!(
            "mutation($input: CreateClusterInput!) {{ createCluster(input: $input) {{ agentToken warnings cluster {{ {CLUSTER} }} }} }}"
        );
        Ok(client.execute(&query, json!({ "input": input })).await?["createCluster"].clone())
    }
}

#[derive(Debug, Subcommand)]
enum Environments {
    /// Adds an environment to a cluster.
    Create {
        name: String,
        cluster: String,
        /// Configuration, as JSON or YAML.
        #[arg(long, short)]
        config: Option<String>,
        #[command(flatten)]
        rules: RulesArgs,
    },
    /// Changes an environment's configuration, and with it the deployments that take values from it.
    Update {
        id: String,
        #[command(flatten)]
        patch: PatchArgs,
        #[command(flatten)]
        rules: RulesArgs,
        #[command(flatten)]
        wait: FanOutArgs,
    },
    /// Shows one environment, or all.
    Get { id: Option<String> },
}

#[derive(Debug, Args)]
struct PatchArgs {
    /// Merged into the configuration, as JSON or YAML; null is a value.
    #[arg(long, short)]
    config: Option<String>,
    /// JSON pointer of a key to remove, so that the next level counts.
    #[arg(long)]
    remove: Vec<String>,
}

#[derive(Debug, Subcommand)]
enum Deployments {
    /// Adds a deployment.
    Create {
        driver: String,
        application_version: String,
        environment: String,
        name: String,
        /// Configuration, as JSON or YAML.
        #[arg(long, short)]
        config: Option<String>,
        #[command(flatten)]
        parameters: ParameterArgs,
        /// Driver version to insist on.
        #[arg(long)]
        driver_version: Option<String>,
        #[command(flatten)]
        wait: WaitArgs,
    },
    /// Changes a deployment's configuration and parameters.
    Update {
        id: String,
        #[command(flatten)]
        patch: PatchArgs,
        #[command(flatten)]
        parameters: ParameterArgs,
        /// Parameter to give back to the driver's default.
        #[arg(long)]
        remove_parameter: Vec<String>,
        #[command(flatten)]
        wait: WaitArgs,
    },
    /// Moves a deployment to a version of its application, choosing the driver version again.
    Upgrade {
        id: String,
        application_version: Option<String>,
        /// Driver version to insist on.
        #[arg(long)]
        driver_version: Option<String>,
        #[command(flatten)]
        wait: WaitArgs,
    },
    /// Makes a deployment what a file says: creates or changes it. What the file does not set is not set.
    Apply {
        /// The file, as YAML or JSON: environment (id), name, driver, applicationVersion, and if wanted
        /// driverVersion, config, parameters. Secret parameters that it leaves out stay.
        #[arg(long, short)]
        file: PathBuf,
        #[command(flatten)]
        wait: WaitArgs,
    },
    /// Gives a component another number of pods.
    Scale {
        id: String,
        component: String,
        replicas: u32,
        #[command(flatten)]
        wait: WaitArgs,
    },
    /// Takes the pods of a deployment away, or of some of its components; its data stays.
    Stop {
        id: String,
        /// Only these components.
        #[arg(long)]
        component: Vec<String>,
        #[command(flatten)]
        wait: WaitArgs,
    },
    /// Runs a deployment again, or some of its components.
    Start {
        id: String,
        /// Only these components.
        #[arg(long)]
        component: Vec<String>,
        #[command(flatten)]
        wait: WaitArgs,
    },
    /// Runs a job of the driver once.
    RunJob {
        id: String,
        job: String,
        #[command(flatten)]
        wait: WaitArgs,
    },
    /// Goes back to an earlier instance.
    Rollback {
        id: String,
        /// The instance.
        #[arg(long)]
        to: String,
        #[command(flatten)]
        wait: WaitArgs,
    },
    /// Removes a deployment.
    Delete {
        id: String,
        #[command(flatten)]
        wait: WaitArgs,
    },
    /// Shows one deployment with every value and its origin, or all.
    Get { id: Option<String> },
}

#[derive(Debug, Args)]
struct ParameterArgs {
    /// A parameter, NAME=VALUE; the value is read as YAML.
    #[arg(long = "set", short, value_name = "NAME=VALUE")]
    set: Vec<String>,
    /// A parameter whose value is the text of a file, NAME=FILE; for secrets.
    #[arg(long, value_name = "NAME=FILE")]
    set_file: Vec<String>,
}

#[derive(Debug, Args)]
struct WaitArgs {
    /// Waits for the change, and fails when it does.
    #[arg(long, value_enum, num_args = 0..=1, require_equals = true, default_missing_value = "finished")]
    wait: Option<Until>,
    /// Longest wait in seconds.
    #[arg(long, default_value_t = 600)]
    timeout: u64,
    /// Only shows what the change would lead to.
    #[arg(long, conflicts_with = "wait")]
    dry_run: bool,
    /// How this change is delivered, whatever cluster and environment say.
    #[arg(long, value_enum)]
    delivery: Option<Delivery>,
}

/// How a change comes to the branch that Flux follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Delivery {
    /// Committed at once.
    Direct,
    /// As a request that people review and merge.
    PullRequest,
}

impl Delivery {
    /// As the API spells it.
    fn word(self) -> &'static str {
        match self {
            Self::Direct => "DIRECT",
            Self::PullRequest => "PULL_REQUEST",
        }
    }
}

/// How changes are delivered; what is not given comes from the level above, or stays.
#[derive(Debug, Clone, Args)]
struct RulesArgs {
    /// At once, or after a review.
    #[arg(long, value_enum)]
    mode: Option<Delivery>,
    /// Branch that requests are for.
    #[arg(long)]
    target_branch: Option<String>,
    /// Somebody who shall review.
    #[arg(long)]
    reviewer: Vec<String>,
    /// Label of requests.
    #[arg(long)]
    label: Vec<String>,
    /// Whether requests begin as drafts.
    #[arg(long)]
    draft: Option<bool>,
    /// How Styrmin merges.
    #[arg(long, value_enum)]
    merge_method: Option<MergeMethod>,
    /// Whether Styrmin merges as soon as the forge says that it may.
    #[arg(long)]
    auto_merge: Option<bool>,
    /// Approvals that a merge by Styrmin needs.
    #[arg(long)]
    approvals: Option<u32>,
}

/// How a request is merged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum MergeMethod {
    Merge,
    Squash,
    Rebase,
}

impl RulesArgs {
    fn input(self) -> Value {
        let list = |names: Vec<String>| (!names.is_empty()).then_some(names);
        json!({
            "mode": self.mode.map(Delivery::word),
            "targetBranch": self.target_branch,
            "reviewers": list(self.reviewer),
            "labels": list(self.label),
            "draft": self.draft,
            "mergeMethod": self.merge_method.map(|method| format!("{method:?}").to_uppercase()),
            "autoMerge": self.auto_merge,
            "approvals": self.approvals,
        })
    }
}

/// The forge of a repository. Its token is read from STYRMIN_FORGE_TOKEN (the Git password serves when that is not
/// set), the secret of its webhook from STYRMIN_WEBHOOK_SECRET.
#[derive(Debug, Clone, Args)]
struct ForgeArgs {
    /// Its kind.
    #[arg(long, value_enum)]
    forge: Option<ForgeKind>,
    /// Base of its API; from the repository's URL when absent.
    #[arg(long)]
    forge_url: Option<String>,
}

/// Kinds of forges.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum ForgeKind {
    /// Gitea or Forgejo.
    Gitea,
    Github,
    Gitlab,
}

impl ForgeArgs {
    /// As input of the API; `None`: nothing was said.
    fn input(self) -> Option<Value> {
        let kind = self.forge.map(|kind| format!("{kind:?}").to_uppercase());
        let [token, secret] = ["STYRMIN_FORGE_TOKEN", "STYRMIN_WEBHOOK_SECRET"].map(|name| std::env::var(name).ok());
        let said = kind.is_some() || self.forge_url.is_some() || token.is_some() || secret.is_some();
        said.then(|| json!({ "kind": kind, "url": self.forge_url, "token": token, "webhookSecret": secret }))
    }
}

#[derive(Debug, Subcommand)]
enum Proposals {
    /// Shows one with what reviewers read.
    Get { id: String },
    /// Shows all, newest first: the last 500.
    List {
        /// Only those of this cluster.
        #[arg(long)]
        cluster: Option<String>,
        /// Only those that wait for a merge.
        #[arg(long)]
        open: bool,
    },
    /// Takes one back: it is closed without a merge, on the forge too.
    Close { id: String },
}

#[derive(Debug, Args)]
struct FanOutArgs {
    /// How this change is delivered, whatever cluster and environment say.
    #[arg(long, value_enum)]
    delivery: Option<Delivery>,
    /// Waits until every deployment that it changes runs with it, and fails when one does not.
    #[arg(long)]
    wait: bool,
    /// Longest wait in seconds.
    #[arg(long, default_value_t = 1800)]
    timeout: u64,
}

/// What opens a repository elsewhere. A password or token is read from STYRMIN_GIT_PASSWORD.
#[derive(Debug, Clone, Args)]
struct AccessArgs {
    /// User for HTTPS; the password is read from STYRMIN_GIT_PASSWORD.
    #[arg(long)]
    git_username: Option<String>,
    /// File with a private key for SSH.
    #[arg(long)]
    git_ssh_key: Option<PathBuf>,
    /// File with the lines of known_hosts that SSH trusts.
    #[arg(long)]
    git_known_hosts: Option<PathBuf>,
    /// File with the certificates of authorities that HTTPS trusts.
    #[arg(long)]
    git_ca: Option<PathBuf>,
    /// URL of a proxy for HTTPS.
    #[arg(long)]
    git_proxy: Option<String>,
}

impl AccessArgs {
    /// As input of the API; `None`: nothing was said.
    async fn input(self) -> anyhow::Result<Option<Map<String, Value>>> {
        let mut input = Map::new();
        for (name, path) in [("sshKey", &self.git_ssh_key), ("knownHosts", &self.git_known_hosts), ("ca", &self.git_ca)]
        {
            if let Some(path) = path {
                let text = tokio::fs::read_to_string(path).await.with_context(|| path.display().to_string())?;
                input.insert(name.to_owned(), text.into());
            }
        }
        let password = std::env::var("STYRMIN_GIT_PASSWORD").ok();
        for (name, value) in [("username", self.git_username), ("password", password), ("proxy", self.git_proxy)] {
            if let Some(value) = value {
                input.insert(name.to_owned(), value.into());
            }
        }
        Ok((!input.is_empty()).then_some(input))
    }
}

#[derive(Debug, Clone, Args)]
struct EditArgs {
    /// What is done about what people change in the repository by hand.
    #[arg(long, value_enum)]
    edit_policy: Option<EditPolicy>,
    /// How many removals at once are taken over without asking.
    #[arg(long)]
    removal_threshold: Option<u32>,
}

impl EditArgs {
    fn input(&self) -> Value {
        let policy = self.edit_policy.map(|policy| format!("{policy:?}").to_uppercase());
        json!({ "policy": policy, "removalThreshold": self.removal_threshold })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum EditPolicy {
    /// They become changes of the deployments; what cannot is put back.
    Adopt,
    /// They are put back.
    Restore,
    /// They stay until somebody decides.
    Hold,
}

#[derive(Debug, Subcommand)]
enum Edits {
    /// Shows one edit.
    Get { id: String },
    /// Shows the edits of a cluster's repository, newest first: the last 500.
    List {
        cluster: String,
        /// Only those that wait for a decision.
        #[arg(long)]
        open: bool,
    },
    /// Makes an edit that is held a change of its deployment, or confirms a removal.
    Adopt { id: String },
    /// Has an edit put back that is held, or a removal that waits.
    Restore { id: String },
}

#[derive(Debug, Subcommand)]
enum FanOuts {
    /// Shows which deployments one changes, which not, and why.
    Get { id: String },
    /// Waits until every deployment that it changes runs with it; fails when one does not.
    Wait {
        id: String,
        /// Longest wait in seconds.
        #[arg(long, default_value_t = 1800)]
        timeout: u64,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Until {
    /// Until its commit is in the repository.
    Pushed,
    /// Until the deployment is as asked: running, stopped or deleted.
    Finished,
}

#[derive(Debug, Subcommand)]
enum Tasks {
    /// Shows a task with its steps.
    Get { id: String },
    /// Tries the newest task of a deployment again, after it failed.
    Retry {
        id: String,
        #[command(flatten)]
        wait: WaitArgs,
    },
    /// Waits for a task; fails when it does.
    Wait {
        id: String,
        /// For what.
        #[arg(long = "for", value_enum, default_value_t = Until::Finished)]
        until: Until,
        /// Longest wait in seconds.
        #[arg(long, default_value_t = 600)]
        timeout: u64,
    },
}

const RULES: &str = "delivery { mode targetBranch reviewers labels draft mergeMethod autoMerge approvals }";
const CLUSTER: &str = "id name gitUrl branch path forge { kind url project } ageRecipients decrypts editPolicy removalThreshold config createdAt";
const PROPOSAL: &str = "id title state message url headBranch author { name } createdAt endedAt";
const EDIT: &str =
    "id kind state path commit author { name email } deployment { id name } task { id state } message createdAt";
const ENVIRONMENT: &str = "id name cluster { id name } config createdAt";
const DEPLOYMENT: &str = "id name driver applicationVersion driverVersion { version } lifecycle state environment { id name } newestInstance { id sequence revision }";
const FAN_OUT: &str = "id level subjectId state createdAt endedAt author { name } changed { total running succeeded failed superseded } deployments { running failed } unchanged skipped { deploymentId reason } failed { deploymentId reason }";
const TASK: &str =
    "id workflow state message sequence createdAt endedAt steps { name state attempt message startedAt endedAt }";

/// The commands, as the reference shows them.
#[must_use]
pub fn command() -> clap::Command {
    Cli::command()
}

/// Does what the command line says.
///
/// # Errors
/// Whatever people have to know.
pub async fn run() -> anyhow::Result<()> {
    let cli = Cli::parse();
    if let Command::Validate { folder, path, base } = &cli.command {
        let report = validate::check(folder, path, base.as_deref()).await?;
        match cli.output {
            Output::Table => {
                let mut out = std::io::stdout().lock();
                writeln!(out, "{}", validate::shown(&report))?;
            }
            other => show(other, &validate::value(&report))?,
        }
        let problems = report.problems.len();
        anyhow::ensure!(problems == 0, "{problems} problems");
        return Ok(());
    }
    let token = match (&cli.token, &cli.token_file) {
        (Some(token), _) => token.clone(),
        (None, Some(file)) => tokio::fs::read_to_string(file)
            .await
            .with_context(|| format!("token file {}", file.display()))?
            .trim()
            .to_owned(),
        (None, None) => bail!("no token: set STYRMIN_TOKEN or STYRMIN_TOKEN_FILE"),
    };
    let client = Client::new(&cli.server, &token)?;
    match cli.command {
        Command::Clusters(command) => clusters(&client, &cli.server, cli.output, *command).await,
        Command::Environments(command) => environments(&client, cli.output, command).await,
        Command::Deployments(command) => deployments(&client, cli.output, command).await,
        Command::Tasks(command) => tasks(&client, cli.output, command).await,
        Command::FanOuts(FanOuts::Get { id }) => {
            let query = format!("query($id: ID!) {{ fanOut(id: $id) {{ {FAN_OUT} }} }}");
            show(cli.output, &found("fanOut", &id, &client.execute(&query, json!({ "id": id })).await?)?)
        }
        Command::Validate { .. } => Ok(()),
        Command::Edits(command) => edits(&client, cli.output, command).await,
        Command::Proposals(command) => proposals(&client, cli.output, command).await,
        Command::FanOuts(FanOuts::Wait { id, timeout }) => wait_for_fan_out(&client, cli.output, &id, timeout).await,
    }
}

async fn edits(client: &Client, output: Output, command: Edits) -> anyhow::Result<()> {
    let decide = async |id: String, decision: &str| {
        let query = format!(
            "mutation($id: ID!, $decision: EditDecision!) {{ decideEdit(id: $id, decision: $decision) {{ {EDIT} }} }}"
        );
        let data = client.execute(&query, json!({ "id": id, "decision": decision })).await?;
        show(output, &data["decideEdit"])
    };
    match command {
        Edits::Get { id } => {
            let query = format!("query($id: ID!) {{ edit(id: $id) {{ {EDIT} }} }}");
            show(output, &found("edit", &id, &client.execute(&query, json!({ "id": id })).await?)?)
        }
        Edits::List { cluster, open } => {
            let query = format!(
                "query($id: ID!, $open: Boolean!) {{ cluster(id: $id) {{ edits(open: $open, first: 500) {{ nodes {{ {EDIT} }} }} }} }}"
            );
            let data = client.execute(&query, json!({ "id": cluster, "open": open })).await?;
            show(output, &found("cluster", &cluster, &data)?["edits"]["nodes"])
        }
        Edits::Adopt { id } => decide(id, "ADOPT").await,
        Edits::Restore { id } => decide(id, "RESTORE").await,
    }
}

async fn proposals(client: &Client, output: Output, command: Proposals) -> anyhow::Result<()> {
    match command {
        Proposals::Get { id } => {
            let query = format!(
                "query($id: ID!) {{ proposal(id: $id) {{ {PROPOSAL} items {{ state deployment {{ id name }} task {{ id state }} }} description }} }}"
            );
            show(output, &found("proposal", &id, &client.execute(&query, json!({ "id": id })).await?)?)
        }
        Proposals::List { cluster, open } => {
            let query = format!(
                "query($cluster: ID, $open: Boolean!) {{ proposals(cluster: $cluster, open: $open, first: 500) {{ nodes {{ {PROPOSAL} }} }} }}"
            );
            let data = client.execute(&query, json!({ "cluster": cluster, "open": open })).await?;
            show(output, &data["proposals"]["nodes"])
        }
        Proposals::Close { id } => {
            let query = format!("mutation($id: ID!) {{ closeProposal(id: $id) {{ {PROPOSAL} }} }}");
            show(output, &client.execute(&query, json!({ "id": id })).await?["closeProposal"])
        }
    }
}

async fn clusters(client: &Client, server: &str, output: Output, command: Clusters) -> anyhow::Result<()> {
    match command {
        Clusters::Create(create) => show(output, &create.send(client).await?),
        Clusters::Bootstrap(arguments) => show(output, &bootstrap::run(client, server, arguments).await?),
        Clusters::Agent { id, values } => {
            let values = match values {
                None => None,
                Some(path) => {
                    let text = tokio::fs::read_to_string(&path).await;
                    Some(object(Some(text.with_context(|| format!("values {}", path.display()))?))?)
                }
            };
            let query = "mutation($id: ID!, $values: JSON) { releaseAgent(cluster: $id, values: $values) { name agentRelease { version values releasedAt } } }";
            show(output, &client.execute(query, json!({ "id": id, "values": values })).await?["releaseAgent"])
        }
        Clusters::Doctor { id, wait } => doctor::run(client, output, &id, Duration::from_secs(wait)).await,
        Clusters::Update { id, patch, age_recipient, edits, access, forge, rules, wait } => {
            let query = format!(
                "mutation($id: ID!, $config: ConfigPatch, $recipients: [String!], $edits: EditRulesInput, $git: GitAccessInput, $forge: RepositoryForgeInput, $rules: DeliveryInput, $delivery: Delivery) {{ updateCluster(id: $id, config: $config, ageRecipients: $recipients, edits: $edits, git: $git, forge: $forge, rules: $rules, delivery: $delivery) {{ of: cluster {{ {CLUSTER} {RULES} }} fanOut {{ id proposal {{ id url }} }} }} }}"
            );
            let variables = json!({ "id": id, "config": patch_input(patch)?, "recipients": (!age_recipient.is_empty()).then_some(age_recipient), "edits": edits.input(), "git": access.input().await?, "forge": forge.input(), "rules": rules.input(), "delivery": wait.delivery.map(Delivery::word) });
            updated(client, output, &client.execute(&query, variables).await?["updateCluster"], &wait).await
        }
        Clusters::Get { id: Some(id) } => {
            let query = format!("query($id: ID!) {{ cluster(id: $id) {{ {CLUSTER} }} }}");
            show(output, &found("cluster", &id, &client.execute(&query, json!({ "id": id })).await?)?)
        }
        Clusters::Get { id: None } => show(output, &all(client, "clusters", CLUSTER).await?),
    }
}

async fn environments(client: &Client, output: Output, command: Environments) -> anyhow::Result<()> {
    match command {
        Environments::Create { name, cluster, config, rules } => {
            let query = format!(
                "mutation($cluster: ID!, $name: String!, $config: JSON, $rules: DeliveryInput) {{ createEnvironment(cluster: $cluster, name: $name, config: $config, rules: $rules) {{ {ENVIRONMENT} }} }}"
            );
            let variables =
                json!({ "cluster": cluster, "name": name, "config": object(config)?, "rules": rules.input() });
            show(output, &client.execute(&query, variables).await?["createEnvironment"])
        }
        Environments::Update { id, patch, rules, wait } => {
            let query = format!(
                "mutation($id: ID!, $config: ConfigPatch!, $rules: DeliveryInput, $delivery: Delivery) {{ updateEnvironment(id: $id, config: $config, rules: $rules, delivery: $delivery) {{ of: environment {{ {ENVIRONMENT} {RULES} }} fanOut {{ id proposal {{ id url }} }} }} }}"
            );
            let variables = json!({ "id": id, "config": patch_input(patch)?, "rules": rules.input(), "delivery": wait.delivery.map(Delivery::word) });
            updated(client, output, &client.execute(&query, variables).await?["updateEnvironment"], &wait).await
        }
        Environments::Get { id: Some(id) } => {
            let query = format!("query($id: ID!) {{ environment(id: $id) {{ {ENVIRONMENT} }} }}");
            show(output, &found("environment", &id, &client.execute(&query, json!({ "id": id })).await?)?)
        }
        Environments::Get { id: None } => show(output, &all(client, "environments", ENVIRONMENT).await?),
    }
}

/// Argument of every change: the instance that somebody has seen.
const BASE: &str = "baseInstanceId";

/// Argument of every change: how it is delivered.
const DELIVERY: &str = "delivery";

/// A change to be asked for: the mutation, and name, type and value of its arguments.
struct Asked {
    mutation: &'static str,
    arguments: Vec<(&'static str, &'static str, Value)>,
}

impl Asked {
    fn new<const N: usize>(mutation: &'static str, arguments: [(&'static str, &'static str, Value); N]) -> Self {
        Self { mutation, arguments: arguments.into() }
    }

    /// A mutation that needs nothing but the deployment.
    fn of(mutation: &'static str, id: String) -> Self {
        Self::new(mutation, [("id", "ID!", id.into())])
    }

    /// Only while this is the deployment's newest instance.
    fn based_on(mut self, instance: &Value) -> Self {
        self.arguments.push((BASE, "ID", instance.clone()));
        self
    }

    /// Delivered in this way.
    fn delivered(mut self, delivery: Delivery) -> Self {
        self.arguments.push((DELIVERY, "Delivery", delivery.word().into()));
        self
    }

    /// The query that asks for it, with `changed` as its answer.
    fn query(&self) -> String {
        let declared: Vec<String> = self.arguments.iter().map(|(name, kind, _)| format!("${name}: {kind}")).collect();
        let given: Vec<String> = self.arguments.iter().map(|(name, ..)| format!("{name}: ${name}")).collect();
        format!(
            "mutation({}) {{ changed: {}({}) {{ deployment {{ {DEPLOYMENT} }} task {{ id }} proposal {{ id headBranch }} }} }}",
            declared.join(", "),
            self.mutation,
            given.join(", ")
        )
    }

    fn variables(&self) -> Value {
        self.arguments.iter().map(|(name, _, value)| ((*name).to_owned(), value.clone())).collect::<Map<_, _>>().into()
    }

    /// The same as input of `previewChange`: one argument stands for itself.
    fn thought(&self) -> Value {
        let mut content = self.variables();
        if let Value::Object(arguments) = &mut content {
            arguments.remove(BASE);
            arguments.remove(DELIVERY);
        }
        if let [(_, _, only)] = self.arguments.as_slice() {
            content = only.clone();
        }
        json!({ self.mutation: content })
    }
}

async fn deployments(client: &Client, output: Output, command: Deployments) -> anyhow::Result<()> {
    let (asked, wait) = match command {
        Deployments::Create {
            driver,
            application_version,
            environment,
            name,
            config,
            parameters,
            driver_version,
            wait,
        } => {
            let input = json!({
                "environment": environment, "name": name, "driver": driver, "applicationVersion": application_version,
                "driverVersion": driver_version, "config": object(config)?, "parameters": parameter_input(&parameters)?,
            });
            (Asked::new("createDeployment", [("input", "CreateDeploymentInput!", input)]), wait)
        }
        Deployments::Update { id, patch, parameters, remove_parameter, wait } => {
            let input = json!({
                "config": patch_input(patch)?, "parameters": parameter_input(&parameters)?, "removeParameters": remove_parameter,
            });
            (update(&id, input), wait)
        }
        Deployments::Upgrade { id, application_version, driver_version, wait } => {
            let arguments = [
                ("id", "ID!", id.into()),
                ("applicationVersion", "String", json!(application_version)),
                ("driverVersion", "String", json!(driver_version)),
            ];
            (Asked::new("upgradeDeployment", arguments), wait)
        }
        Deployments::Apply { file, wait } => {
            let text = tokio::fs::read_to_string(&file).await.with_context(|| file.display().to_string())?;
            let asked = apply::asked(client, &text).await.with_context(|| file.display().to_string())?;
            (asked, wait)
        }
        Deployments::Scale { id, component, replicas, wait } => {
            let arguments = [
                ("id", "ID!", id.into()),
                ("component", "String!", component.into()),
                ("replicas", "Int!", replicas.into()),
            ];
            (Asked::new("scaleDeployment", arguments), wait)
        }
        Deployments::Stop { id, component, wait } => {
            (whole_or_components("stopDeployment", "stopComponents", id, component), wait)
        }
        Deployments::Start { id, component, wait } => {
            (whole_or_components("startDeployment", "startComponents", id, component), wait)
        }
        Deployments::RunJob { id, job, wait } => {
            (Asked::new("runJob", [("id", "ID!", id.into()), ("action", "String!", job.into())]), wait)
        }
        Deployments::Rollback { id, to, wait } => {
            (Asked::new("rollbackDeployment", [("id", "ID!", id.into()), ("toInstance", "ID!", to.into())]), wait)
        }
        Deployments::Delete { id, wait } => (Asked::of("deleteDeployment", id), wait),
        Deployments::Get { id: Some(id) } => {
            let query = format!(
                "query($id: ID!) {{ deployment(id: $id) {{ {DEPLOYMENT} values {{ field value origin }} tasks(first: 5) {{ nodes {{ id workflow state message }} }} }} }}"
            );
            return show(output, &found("deployment", &id, &client.execute(&query, json!({ "id": id })).await?)?);
        }
        Deployments::Get { id: None } => return show(output, &all(client, "deployments", DEPLOYMENT).await?),
    };
    ask(client, output, asked, &wait).await
}

fn update(id: &str, input: Value) -> Asked {
    Asked::new("updateDeployment", [("id", "ID!", id.into()), ("input", "UpdateDeploymentInput!", input)])
}

fn whole_or_components(whole: &'static str, some: &'static str, id: String, components: Vec<String>) -> Asked {
    if components.is_empty() {
        return Asked::of(whole, id);
    }
    Asked::new(some, [("id", "ID!", id.into()), ("components", "[String!]!", json!(components))])
}

/// Asks for a change and waits as wished, or shows what it would lead to.
async fn ask(client: &Client, output: Output, asked: Asked, wait: &WaitArgs) -> anyhow::Result<()> {
    if wait.dry_run {
        let query = "query($change: ChangeInput!) { previewChange(change: $change) { workflow steps warnings document \
            changes { field old new added removed origin } objects { kind namespace name diff } } }";
        let data = client.execute(query, json!({ "change": asked.thought() })).await?;
        return match output {
            Output::Table => preview(&data["previewChange"]),
            _ => show(output, &data["previewChange"]),
        };
    }
    let asked = match wait.delivery {
        Some(delivery) => asked.delivered(delivery),
        None => asked,
    };
    let changed = client.execute(&asked.query(), asked.variables()).await?["changed"].clone();
    show(output, &changed)?;
    match (wait.wait, changed["task"]["id"].as_str()) {
        (Some(until), Some(task)) => wait_for(client, output, task, until, wait.timeout).await,
        _ => Ok(()),
    }
}

/// A preview for people: what changes value by value, the objects, what to know, the steps.
fn preview(found: &Value) -> anyhow::Result<()> {
    let mut out = std::io::stdout();
    let list = |key: &str| found[key].as_array().cloned().unwrap_or_default();
    let Some(workflow) = found["workflow"].as_str() else {
        writeln!(out, "Nothing changes for the cluster.")?;
        return Ok(());
    };
    writeln!(out, "Workflow: {workflow}")?;
    for warning in list("warnings") {
        writeln!(out, "Warning: {}", cell(&warning))?;
    }
    writeln!(out, "\nValues:")?;
    for value in list("changes") {
        let side =
            |absent: &str, key: &str| if value[absent] == true { "-".to_owned() } else { value[key].to_string() };
        let origin = value["origin"].as_str().map_or(String::new(), |origin| format!("  ({})", origin.to_lowercase()));
        writeln!(out, "  {}: {} -> {}{origin}", cell(&value["field"]), side("added", "old"), side("removed", "new"))?;
    }
    writeln!(out, "\nObjects:")?;
    for object in list("objects") {
        write!(out, "{}", cell(&object["diff"]))?;
    }
    writeln!(out, "\nSteps:")?;
    for step in list("steps") {
        writeln!(out, "  {}", cell(&step))?;
    }
    Ok(())
}

async fn tasks(client: &Client, output: Output, command: Tasks) -> anyhow::Result<()> {
    match command {
        Tasks::Get { id } => {
            let query = format!("query($id: ID!) {{ task(id: $id) {{ {TASK} }} }}");
            show(output, &found("task", &id, &client.execute(&query, json!({ "id": id })).await?)?)
        }
        Tasks::Retry { id, wait } => {
            ask(client, output, Asked::new("retryTask", [("task", "ID!", id.into())]), &wait).await
        }
        Tasks::Wait { id, until, timeout } => wait_for(client, output, &id, until, timeout).await,
    }
}

/// Waits, tells of each step as it moves, prints them in the end, and fails when the change did.
async fn wait_for(client: &Client, output: Output, id: &str, until: Until, timeout: u64) -> anyhow::Result<()> {
    let (interval, limit) = (Duration::from_secs(1), Duration::from_secs(timeout));
    let mut told = Vec::new();
    let tell = |task: &TaskProgress| {
        for (name, state, message) in &task.steps {
            let step = (name.clone(), state.clone(), message.clone());
            if state != "PENDING" && !told.contains(&step) {
                let message = message.as_deref().map_or(String::new(), |message| format!(": {message}"));
                // To whoever watches; what is read by programs comes at the end.
                let _ = writeln!(std::io::stderr(), "{} {name}{message}", state.to_lowercase());
                told.push(step);
            }
        }
    };
    let (task, failure) = match until {
        Until::Pushed => {
            let done = |task: &TaskProgress| task.pushed() || task.ended();
            let task = client.wait_for_task(id, done, interval, limit).await?;
            let failure = match task.outcome(id) {
                _ if task.pushed() => None,
                Some(outcome) => outcome.err(),
                None => Some("wait timeout".to_owned()),
            };
            (task, failure)
        }
        Until::Finished => {
            let waited = client.wait_until_done(id, interval, limit, tell).await?;
            (waited.task, waited.failure_reason)
        }
    };
    let steps: Vec<Value> = task
        .steps
        .iter()
        .map(|(name, state, message)| json!({ "name": name, "state": state, "message": message }))
        .collect();
    show(output, &json!({ "id": id, "state": task.state, "message": task.message, "steps": steps }))?;
    match failure {
        Some(reason) => bail!("{reason}"),
        None => Ok(()),
    }
}

/// Shows a changed cluster or environment, and follows its configuration as wished.
async fn updated(client: &Client, output: Output, payload: &Value, wait: &FanOutArgs) -> anyhow::Result<()> {
    let mut shown = payload["of"].clone();
    shown["fanOut"] = payload["fanOut"]["id"].clone();
    shown["proposal"] = payload["fanOut"]["proposal"].clone();
    show(output, &shown)?;
    match payload["fanOut"]["id"].as_str() {
        Some(id) if wait.wait => wait_for_fan_out(client, output, id, wait.timeout).await,
        _ => Ok(()),
    }
}

/// Waits, tells how far it is, and fails when a deployment could not be changed or did not come to run.
async fn wait_for_fan_out(client: &Client, output: Output, id: &str, timeout: u64) -> anyhow::Result<()> {
    let mut told = String::new();
    let tell = |seen: &FanOutProgress| {
        let FanOutProgress { changed, running, failed, unchanged, .. } = seen;
        let now = format!(
            "{changed} deployments change, {unchanged} have it already; {running} are on their way, {failed} failed"
        );
        if now != told {
            let _ = writeln!(std::io::stderr(), "{now}");
            told = now;
        }
    };
    let (interval, limit) = (Duration::from_secs(1), Duration::from_secs(timeout));
    let ended = client.wait_for_fan_out(id, interval, limit, tell).await?;
    let reasons = |list: &[(String, String)]| {
        list.iter().map(|(id, reason)| json!({ "deployment": id, "reason": reason })).collect::<Vec<Value>>()
    };
    show(
        output,
        &json!({ "id": id, "changed": ended.changed, "failed": ended.failed, "unchanged": ended.unchanged,
            "skipped": reasons(&ended.skipped), "refused": reasons(&ended.refused) }),
    )?;
    match ended.outcome() {
        Some(outcome) => outcome.map_err(anyhow::Error::msg),
        None => bail!("wait timeout"),
    }
}

/// All pages of a list.
async fn all(client: &Client, list: &str, fields: &str) -> anyhow::Result<Value> {
    let query = format!(
        "query($after: String) {{ {list}(first: 200, after: $after) {{ nodes {{ {fields} }} pageInfo {{ hasNextPage endCursor }} }} }}"
    );
    let (mut nodes, mut after) = (Vec::new(), Value::Null);
    loop {
        let data = client.execute(&query, json!({ "after": after })).await?;
        let page = &data[list];
        nodes.extend(page["nodes"].as_array().cloned().unwrap_or_default());
        if page["pageInfo"]["hasNextPage"] != true {
            return Ok(Value::Array(nodes));
        }
        after = page["pageInfo"]["endCursor"].clone();
    }
}

fn found(kind: &str, id: &str, data: &Value) -> anyhow::Result<Value> {
    let value = data[kind].clone();
    if value.is_null() {
        bail!("{kind} \"{id}\": does not exist");
    }
    Ok(value)
}

fn object(text: Option<String>) -> anyhow::Result<Value> {
    let Some(text) = text else { return Ok(Value::Null) };
    let value: Value = yaml::from_str(&text).context("--config")?;
    if !value.is_object() {
        bail!("--config must be a mapping, as JSON or YAML");
    }
    Ok(value)
}

fn patch_input(patch: PatchArgs) -> anyhow::Result<Value> {
    Ok(json!({ "set": object(patch.config)?, "remove": patch.remove }))
}

fn parameter_input(arguments: &ParameterArgs) -> anyhow::Result<Value> {
    let mut parameters = Map::new();
    for pair in &arguments.set {
        let (name, text) = pair.split_once('=').with_context(|| format!("--set {pair}: write NAME=VALUE"))?;
        let value = yaml::from_str(text).with_context(|| format!("--set {name}: the value is not YAML"))?;
        parameters.insert(name.to_owned(), value);
    }
    for pair in &arguments.set_file {
        let (name, file) = pair.split_once('=').with_context(|| format!("--set-file {pair}: write NAME=FILE"))?;
        let text = std::fs::read_to_string(file).with_context(|| format!("--set-file {name}: {file}"))?;
        parameters.insert(name.to_owned(), Value::from(text.trim_end_matches('\n')));
    }
    Ok(Value::Object(parameters))
}

fn show(output: Output, value: &Value) -> anyhow::Result<()> {
    let text = match output {
        Output::Json => serde_json::to_string_pretty(value)?,
        Output::Yaml => yaml::to_string(value)?,
        Output::Table => table(value),
    };
    writeln!(std::io::stdout(), "{}", text.trim_end())?;
    Ok(())
}

/// A list of objects as a table with a column each, one object as two columns.
fn table(value: &Value) -> String {
    let mut builder = Builder::default();
    match value {
        Value::Array(rows) => {
            let Some(Value::Object(first)) = rows.first() else { return "nothing".to_owned() };
            let columns: Vec<&String> = first.keys().collect();
            builder.push_record(columns.iter().map(|column| column.as_str()));
            for row in rows {
                builder.push_record(columns.iter().map(|column| cell(&row[column.as_str()])));
            }
        }
        Value::Object(map) => {
            for (key, value) in map {
                builder.push_record([key.clone(), cell(value)]);
            }
        }
        other => return cell(other),
    }
    builder.build().with(Style::blank()).to_string()
}

fn cell(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        Value::Array(items) => items.iter().map(cell).collect::<Vec<_>>().join("\n"),
        Value::Object(map) => {
            let parts = map.iter().filter(|(_, value)| !value.is_null());
            parts.map(|(key, value)| format!("{key}: {}", cell(value))).collect::<Vec<_>>().join("  ")
        }
        other => other.to_string(),
    }
}
