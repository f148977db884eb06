//! `clusters bootstrap`: everything that a new cluster needs, in a folder, and applied when that is asked for. The
//! same once more gives the same: what is there, in the folder and on the server, stays.

use super::{CLUSTER, CreateArgs, found};
use age::secrecy::ExposeSecret as _;
use age::x25519::Identity;
use anyhow::{Context as _, bail, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use clap::Args;
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::str::FromStr as _;
use std::time::Duration;
use styrmin_client::Client;
use styrmin_renderer::layout::{FLUX_NAMESPACE, SYSTEM_NAMESPACE};
use styrmin_renderer::objects::{self, AGE_SECRET};
use styrmin_renderer::yaml;
use tokio::fs;
use tokio::process::Command;

/// How long one program may take: helm waits for the chart's Job.
const LIMIT: Duration = Duration::from_secs(600);
/// Release and Secret of the agent.
const AGENT: &str = "styrmin-agent";
/// Secret with what Flux reads the repository with.
const GIT_SECRET: &str = "styrmin-git";

#[derive(Debug, Args)]
pub(crate) struct BootstrapArgs {
    #[command(flatten)]
    create: CreateArgs,
    /// Folder for keys, tokens and what is to be applied (default: named as the cluster).
    #[arg(long)]
    folder: Option<PathBuf>,
    /// Address of the server as pods of the cluster reach it (default: that of --server).
    #[arg(long)]
    server_for_cluster: Option<String>,
    /// Has the agent's chart install Flux's controllers, for a cluster that has none.
    #[arg(long)]
    flux: bool,
    /// User with which Flux reads a repository elsewhere; the password is read from STYRMIN_FLUX_GIT_PASSWORD
    /// (default: the server's own credentials, which may write too).
    #[arg(long)]
    flux_git_username: Option<String>,
    /// File with a private key for SSH with which Flux reads a repository elsewhere.
    #[arg(long)]
    flux_git_ssh_key: Option<PathBuf>,
    /// Gives the agent another token, in place of the one that it has: when the folder with that one is lost.
    #[arg(long)]
    new_token: bool,
    /// Applies it, with the programs helm and kubectl.
    #[arg(long)]
    apply: bool,
    /// Chart of the agent: a folder (helm/agent of the source), a package (./scripts/charts), or a reference to a
    /// repository that helm knows.
    #[arg(long, default_value = "styrmin/styrmin-agent")]
    chart: String,
    /// Context of the kubeconfig (default: its current one).
    #[arg(long)]
    context: Option<String>,
}

/// What was made, for people and programs.
pub(crate) async fn run(client: &Client, server: &str, arguments: BootstrapArgs) -> anyhow::Result<Value> {
    let folder = arguments.folder.clone().unwrap_or_else(|| PathBuf::from(&arguments.create.name));
    make_folder(&folder).await?;
    let identity = age_key(&folder.join("age.agekey")).await?;
    let recipient = identity.to_public().to_string();
    let query = format!("query($id: ID!) {{ cluster(id: $id) {{ {CLUSTER} }} }}");
    let name = arguments.create.name.clone();
    let known = client.execute(&query, json!({ "id": name })).await?["cluster"].clone();
    let flux_git = flux_git(&arguments).await?;
    let token_file = folder.join("agent-token");
    let token = if known.is_null() {
        let mut create = arguments.create.clone();
        if !create.age_recipient.contains(&recipient) {
            create.age_recipient.push(recipient.clone());
        }
        let made = create.send(client).await?;
        let token = made["agentToken"].as_str().context("the server gave no token")?.to_owned();
        replace(&token_file, &token).await?;
        token
    } else {
        agree(client, &known, &recipient, &folder).await?;
        token(client, &known, &token_file, arguments.new_token).await?
    };
    let query = format!("query($id: ID!) {{ cluster(id: $id) {{ {CLUSTER} fluxManifest }} }}");
    let cluster = found("cluster", &name, &client.execute(&query, json!({ "id": name })).await?)?;

    let address = arguments.server_for_cluster.as_deref().unwrap_or(server);
    let values = json!({ "server": { "address": address }, "flux": { "enabled": arguments.flux } });
    let git = match cluster["gitUrl"].is_null() {
        true => Some(json!({ "username": "agent", "password": token })),
        // Nothing was said: what the folder has stays.
        false => Some(Value::Object(flux_git)).filter(|data| data != &json!({})),
    };
    let key = identity.to_string();
    let secrets = [
        secret(SYSTEM_NAMESPACE, AGENT, json!({ "token": token })),
        secret(FLUX_NAMESPACE, AGE_SECRET, json!({ "age.agekey": key.expose_secret() })),
    ];
    let [values_file, secrets_file, git_file, flux_file] =
        ["values.yaml", "secrets.yaml", "git.yaml", "flux.yaml"].map(|name| folder.join(name));
    replace(&secrets_file, &objects::documents(&secrets)?).await?;
    if let Some(git) = git {
        // Once where Flux follows the repository, once where it takes the agent's chart from it.
        let both = [SYSTEM_NAMESPACE, FLUX_NAMESPACE].map(|namespace| secret(namespace, GIT_SECRET, git.clone()));
        replace(&git_file, &objects::documents(&both)?).await?;
    }
    // These are people's once they are there.
    if !is_there(&values_file).await? {
        replace(&values_file, &yaml::to_string(&values)?).await?;
    }
    if !is_there(&flux_file).await? {
        replace(&flux_file, cluster["fluxManifest"].as_str().unwrap_or_default()).await?;
    }
    let mut files = vec![secrets_file];
    if is_there(&git_file).await? {
        files.push(git_file);
    }
    files.push(flux_file);
    let commands = commands(&arguments, &values_file, &files);
    let mut applied = Vec::new();
    if arguments.apply {
        for command in &commands {
            applied.push(execute(command).await?);
        }
    }
    let shown: Vec<String> = commands.iter().map(|command| shown(command)).collect();
    Ok(json!({
        "cluster": cluster["id"], "name": name, "folder": folder.display().to_string(), "ageRecipient": recipient,
        "applied": arguments.apply, "commands": shown,
        "next": format!("{}styrminctl clusters doctor {name} --wait 300", if arguments.apply { "" } else { "Run the commands, then: " }),
        "keep": "A copy of age.agekey: without it nobody can read the secrets in the repository.",
    }))
}

async fn is_there(file: &Path) -> anyhow::Result<bool> {
    fs::try_exists(file).await.with_context(|| format!("the file {}", file.display()))
}

/// A folder for secrets, which only its owner may open; one that is there stays as it is.
async fn make_folder(folder: &Path) -> anyhow::Result<()> {
    let what = || format!("the folder {}", folder.display());
    if is_there(folder).await? {
        return Ok(());
    }
    fs::create_dir_all(folder).await.with_context(what)?;
    use std::os::unix::fs::PermissionsExt as _;
    fs::set_permissions(folder, std::fs::Permissions::from_mode(0o700)).await.with_context(what)
}

/// The cluster's key; made when the file is not there.
async fn age_key(file: &Path) -> anyhow::Result<Identity> {
    let what = || format!("the age key {}", file.display());
    match fs::read_to_string(file).await {
        Ok(text) => {
            let line = text.lines().map(str::trim).find(|line| line.starts_with("AGE-SECRET-KEY-"));
            let found = line.with_context(|| format!("{} has no line AGE-SECRET-KEY-…", what()))?;
            Identity::from_str(found).map_err(anyhow::Error::msg).with_context(what)
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let identity = Identity::generate();
            let text = format!("# public key: {}\n{}", identity.to_public(), identity.to_string().expose_secret());
            write(file, &text).await?;
            Ok(identity)
        }
        Err(error) => Err(error).with_context(what),
    }
}

/// A cluster that is there encrypts for the folder's key.
async fn agree(client: &Client, known: &Value, recipient: &str, folder: &Path) -> anyhow::Result<()> {
    let recipients: Vec<&str> =
        known["ageRecipients"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    if recipients.contains(&recipient) {
        return Ok(());
    }
    ensure!(
        recipients.is_empty(),
        "cluster {}: its secrets are encrypted for {}, and the key in {} is another one: put that key there as age.agekey, or name both recipients first (clusters update --age-recipient)",
        known["name"],
        recipients.join(", "),
        folder.display()
    );
    let query = "mutation($id: ID!, $recipients: [String!]) { updateCluster(id: $id, ageRecipients: $recipients) { cluster { id } } }";
    client.execute(query, json!({ "id": known["id"], "recipients": [recipient] })).await?;
    Ok(())
}

/// The token of a cluster's agent that is there.
async fn token(client: &Client, known: &Value, file: &Path, new: bool) -> anyhow::Result<String> {
    if new {
        let query = "mutation($id: ID!) { replaceAgentToken(cluster: $id) { token } }";
        let data = client.execute(query, json!({ "id": known["id"] })).await?;
        let token = data["replaceAgentToken"]["token"].as_str().context("the server gave no token")?.to_owned();
        replace(file, &format!("{token}\n")).await?;
        return Ok(token);
    }
    match fs::read_to_string(file).await {
        Ok(text) => Ok(text.trim().to_owned()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => bail!(
            "cluster {} is there already, and {} is not: its agent's token is shown once. Give the folder of the first time with --folder, or another token to the agent with --new-token",
            known["name"],
            file.display()
        ),
        Err(error) => Err(error).with_context(|| format!("the token's file {}", file.display())),
    }
}

/// What Flux reads a repository elsewhere with, as data of its Secret.
async fn flux_git(arguments: &BootstrapArgs) -> anyhow::Result<Map<String, Value>> {
    let access = arguments.create.access().await?.unwrap_or_default();
    let mut data = Map::new();
    let password = std::env::var("STYRMIN_FLUX_GIT_PASSWORD").ok();
    let own = arguments.flux_git_username.is_some() || password.is_some() || arguments.flux_git_ssh_key.is_some();
    let mut put = |name: &str, value: Option<Value>| {
        if let Some(value) = value {
            data.insert(name.to_owned(), value);
        }
    };
    if own {
        put("username", arguments.flux_git_username.clone().map(Value::from));
        put("password", password.map(Value::from));
        if let Some(path) = &arguments.flux_git_ssh_key {
            let text = fs::read_to_string(path).await.with_context(|| path.display().to_string())?;
            put("identity", Some(text.into()));
        }
    } else {
        put("username", access.get("username").cloned());
        put("password", access.get("password").cloned());
        put("identity", access.get("sshKey").cloned());
    }
    if data.contains_key("password") && !data.contains_key("username") {
        // Any will do for a token, and Flux wants one.
        data.insert("username".to_owned(), "git".into());
    }
    let mut put = |name: &str, value: Option<Value>| {
        if let Some(value) = value {
            data.insert(name.to_owned(), value);
        }
    };
    put("known_hosts", access.get("knownHosts").cloned());
    put("ca.crt", access.get("ca").cloned());
    Ok(data)
}

/// A Secret. Its data is encoded here: applied on the server, what `stringData` does not name any more would stay.
fn secret(namespace: &str, name: &str, data: Value) -> Value {
    let mut encoded = data;
    for text in encoded.as_object_mut().into_iter().flat_map(Map::values_mut) {
        *text = STANDARD.encode(text.as_str().unwrap_or_default()).into();
    }
    json!({ "apiVersion": "v1", "kind": "Secret", "metadata": { "namespace": namespace, "name": name }, "data": encoded })
}

/// A command, to be copied into a shell.
fn shown(command: &[String]) -> String {
    let plain = |word: &str| word.chars().all(|c| c.is_ascii_alphanumeric() || "-_./:=@,+".contains(c));
    let words = command.iter().map(|word| match plain(word) {
        true => word.clone(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    });
    words.collect::<Vec<_>>().join(" ")
}

/// What brings it into the cluster: the agent first, since its chart may bring Flux, whose kinds come after.
fn commands(arguments: &BootstrapArgs, values: &Path, files: &[PathBuf]) -> [Vec<String>; 2] {
    let values = values.display().to_string();
    let mut helm: Vec<String> = ["helm", "upgrade", "--install", AGENT, &arguments.chart].map(str::to_owned).into();
    helm.extend(["--namespace", SYSTEM_NAMESPACE, "--create-namespace", "--values", &values].map(str::to_owned));
    let mut kubectl: Vec<String> = ["kubectl", "apply", "--server-side", "--force-conflicts"].map(str::to_owned).into();
    for file in files {
        kubectl.extend(["--filename".to_owned(), file.display().to_string()]);
    }
    if let Some(context) = &arguments.context {
        helm.extend(["--kube-context".to_owned(), context.clone()]);
        kubectl.extend(["--context".to_owned(), context.clone()]);
    }
    [helm, kubectl]
}

async fn execute(command: &[String]) -> anyhow::Result<()> {
    let [program, arguments @ ..] = command else { return Ok(()) };
    let what = || shown(command);
    let child = Command::new(program).args(arguments).stdin(Stdio::null()).kill_on_drop(true).output();
    let output = tokio::time::timeout(LIMIT, child)
        .await
        .with_context(|| format!("{}: not within {} s", what(), LIMIT.as_secs()))?;
    let output = output.with_context(|| format!("{}: is {program} installed?", what()))?;
    ensure!(output.status.success(), "{}: {}", what(), String::from_utf8_lossy(&output.stderr).trim());
    Ok(())
}

/// Writes a file that only its owner reads, unless it is there.
async fn write(file: &Path, text: &str) -> anyhow::Result<()> {
    let opened = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(file).await;
    fill(file, opened, text).await
}

/// Writes a file that only its owner reads, as a whole or not at all.
async fn replace(file: &Path, text: &str) -> anyhow::Result<()> {
    let temporary = file.with_extension(format!("{}.tmp", std::process::id()));
    let opened = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temporary).await;
    fill(&temporary, opened, text.trim_end()).await?;
    fs::rename(&temporary, file).await.with_context(|| format!("the file {}", file.display()))
}

async fn fill(file: &Path, opened: std::io::Result<fs::File>, text: &str) -> anyhow::Result<()> {
    use tokio::io::AsyncWriteExt as _;
    let written = async {
        let mut opened = opened?;
        opened.write_all(text.as_bytes()).await?;
        opened.write_all(b"\n").await?;
        opened.sync_all().await
    };
    written.await.with_context(|| format!("the file {}", file.display()))
}
