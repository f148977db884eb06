//! A Gitea of its own for one test: a real forge with pull requests, on SQLite, without web assets.

use crate::plane::{Port, Program, Recipe};
use crate::{eventually, http, tools};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::Duration;
use tempfile::TempDir;
use tokio::process::Command;

/// The administrator's name.
pub const ADMIN: &str = "styrmin";
const PASSWORD: &str = "only-for-this-test-1";

/// A running Gitea; ends with the value.
pub struct Gitea {
    program: Program,
    port: Port,
    folder: TempDir,
    token: String,
}

impl Gitea {
    /// Starts one with an administrator.
    ///
    /// # Panics
    /// When it does not come up; the message has the end of its log.
    pub async fn start() -> Self {
        let folder = tempfile::Builder::new().prefix("styrmin-gitea-").tempdir().unwrap();
        let files = folder.path().join("files");
        std::fs::create_dir_all(&files).unwrap();
        let mut unpack = Command::new("tar");
        unpack.arg("-xf").arg(tools::folder().join("gitea-files.tar")).arg("-C").arg(&files);
        tools::run(&mut unpack, b"").await;
        let port = Port::claim();
        let configuration = folder.path().join("app.ini");
        std::fs::write(&configuration, settings(folder.path(), &files, port.number())).unwrap();
        let arguments = |more: &[&str]| -> Vec<String> {
            let all = more.iter().map(|text| (*text).to_owned());
            all.chain(["--config".into(), configuration.display().to_string()]).collect()
        };
        let environment = vec![("HOME".to_owned(), folder.path().display().to_string())];
        for step in [
            &["migrate"][..],
            &["admin", "user", "create", "--admin", "--username", ADMIN, "--password", PASSWORD]
                .into_iter()
                .chain(["--email", "styrmin@example.com", "--must-change-password=false"])
                .collect::<Vec<_>>(),
        ] {
            let mut command = Command::new(tools::tool("gitea"));
            command.args(arguments(step)).envs(environment.iter().cloned()).current_dir(folder.path());
            tools::run(&mut command, b"").await;
        }
        let recipe = Recipe {
            name: "gitea".into(),
            program: tools::tool("gitea"),
            arguments: arguments(&["web"]),
            environment,
            folder: folder.path().to_owned(),
        };
        let program = Program::start(recipe, folder.path());
        let mut gitea = Self { program, port, folder, token: String::new() };
        eventually("Gitea answers", Duration::from_secs(60), async || {
            let answer = http().get(format!("{}/api/healthz", gitea.url())).send().await;
            answer.and_then(reqwest::Response::error_for_status).map(drop).map_err(|_| gitea.program.log_tail())
        })
        .await;
        let answer = http()
            .post(format!("{}/api/v1/users/{ADMIN}/tokens", gitea.url()))
            .basic_auth(ADMIN, Some(PASSWORD))
            .json(&json!({ "name": "tests", "scopes": ["all"] }))
            .send()
            .await
            .unwrap();
        let answer: Value = answer.error_for_status().unwrap().json().await.unwrap();
        gitea.token = answer["sha1"].as_str().unwrap().to_owned();
        gitea
    }

    /// Its address.
    #[must_use]
    pub fn url(&self) -> String {
        format!("http://{}", self.port.address())
    }

    /// A token of the administrator.
    #[must_use]
    pub fn token(&self) -> &str {
        &self.token
    }

    /// The program, to kill and restart it.
    #[must_use]
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// Its folder.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Asks its API as the administrator; `path` is below `/api/v1/`.
    ///
    /// # Panics
    /// When the answer is no success.
    pub async fn api(&self, method: &str, path: &str, body: &Value) -> Value {
        self.api_as(&self.token, method, path, body)
            .await
            .unwrap_or_else(|refusal| panic!("{method} {path}: {refusal}"))
    }

    /// The same with somebody's token; an answer that is no success is an error.
    ///
    /// # Errors
    /// With status and text.
    ///
    /// # Panics
    /// When it does not answer.
    pub async fn api_as(&self, token: &str, method: &str, path: &str, body: &Value) -> Result<Value, String> {
        let url = format!("{}/api/v1/{path}", self.url());
        let request = http().request(method.parse().unwrap(), url).bearer_auth(token).json(body);
        let answer = request.send().await.unwrap();
        let status = answer.status();
        let text = answer.text().await.unwrap();
        if !status.is_success() {
            return Err(format!("{status} {text}"));
        }
        Ok(if text.is_empty() { Value::Null } else { serde_json::from_str(&text).unwrap() })
    }

    /// Adds a person who may write to a repository of the administrator; gives their token.
    pub async fn person(&self, name: &str, repository: &str) -> String {
        let email = format!("{name}@example.com");
        let user = json!({ "username": name, "email": email, "password": PASSWORD, "must_change_password": false });
        self.api("POST", "admin/users", &user).await;
        let path = format!("repos/{ADMIN}/{repository}/collaborators/{name}");
        self.api("PUT", &path, &json!({ "permission": "write" })).await;
        let answer = http()
            .post(format!("{}/api/v1/users/{name}/tokens", self.url()))
            .basic_auth(name, Some(PASSWORD))
            .json(&json!({ "name": "tests", "scopes": ["all"] }))
            .send()
            .await
            .unwrap();
        let answer: Value = answer.error_for_status().unwrap().json().await.unwrap();
        answer["sha1"].as_str().unwrap().to_owned()
    }

    /// Makes a repository of the administrator with a first commit on `main`; gives its Git URL.
    pub async fn repository(&self, name: &str) -> String {
        let body = json!({ "name": name, "auto_init": true, "default_branch": "main", "private": true });
        let made = self.api("POST", "user/repos", &body).await;
        made["clone_url"].as_str().unwrap().to_owned()
    }
}

fn settings(folder: &Path, files: &Path, port: u16) -> String {
    let path = |name: &str| -> PathBuf { folder.join(name) };
    let root = rustix::process::geteuid().is_root();
    let account = std::env::var("USER").unwrap_or_else(|_| if root { "root".into() } else { String::new() });
    format!(
        "APP_NAME = test\nRUN_USER = {account}\nRUN_MODE = prod\nWORK_PATH = {}\n\
         I_AM_BEING_UNSAFE_RUNNING_AS_ROOT = {root}\n\
         [server]\nPROTOCOL = http\nHTTP_ADDR = 127.0.0.1\nHTTP_PORT = {port}\nROOT_URL = http://127.0.0.1:{port}/\n\
         DISABLE_SSH = true\nOFFLINE_MODE = true\nSTATIC_ROOT_PATH = {}\nLFS_START_SERVER = false\n\
         [database]\nDB_TYPE = sqlite3\nPATH = {}\nSQLITE_JOURNAL_MODE = WAL\n\
         [repository]\nROOT = {}\nDEFAULT_BRANCH = main\n\
         [security]\nINSTALL_LOCK = true\nSECRET_KEY = {:032x}\nPASSWORD_HASH_ALGO = pbkdf2_v2\n\
         [webhook]\nALLOWED_HOST_LIST = loopback\n\
         [service]\nDISABLE_REGISTRATION = true\n\
         [actions]\nENABLED = false\n[packages]\nENABLED = false\n[indexer]\nISSUE_INDEXER_TYPE = db\n\
         [cron.update_checker]\nENABLED = false\n[log]\nLEVEL = Warn\nMODE = console\n",
        folder.display(),
        files.display(),
        path("gitea.db").display(),
        path("repositories").display(),
        rand::random::<u128>(),
    )
}
