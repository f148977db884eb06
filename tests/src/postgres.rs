//! A PostgreSQL of its own for one test.

use crate::plane::Port;
use crate::{child, eventually};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;
use tempfile::TempDir;
use tokio::process::{Child, Command};

/// A running PostgreSQL; ends with the value.
pub struct Postgres {
    _child: Child,
    folder: TempDir,
    port: Port,
}

/// Folder of PostgreSQL's programs: the newest that Debian has installed.
fn programs() -> PathBuf {
    let mut found: Vec<PathBuf> = std::fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten()
        .filter_map(Result::ok)
        .map(|entry| entry.path().join("bin"))
        .filter(|path| path.join("postgres").is_file())
        .collect();
    found.sort();
    found.pop().expect("PostgreSQL is missing; scripts/test installs it")
}

impl Postgres {
    /// Starts one. PostgreSQL refuses to run as root, so root uses the account `postgres`.
    pub async fn start() -> Self {
        let folder = tempfile::Builder::new().prefix("styrmin-postgres-").tempdir().unwrap();
        let data = folder.path().join("data");
        let root = rustix::process::geteuid().is_root();
        if root {
            run(Command::new("chown").arg("postgres:").arg(folder.path())).await;
        }
        let as_account = |program: &Path| {
            let mut command = child("setpriv");
            if root {
                command.args(["--reuid", "postgres", "--regid", "postgres", "--clear-groups", "--pdeathsig", "KILL"]);
            }
            command.arg("--").arg(program).current_dir("/");
            command
        };
        let initialise = programs().join("initdb");
        run(as_account(&initialise).args(["-A", "trust", "-U", "styrmin", "--no-sync", "-E", "UTF8", "-D"]).arg(&data))
            .await;
        let port = Port::claim();
        let child = as_account(&programs().join("postgres"))
            .arg("-D")
            .arg(&data)
            .args([
                "-p",
                &port.number().to_string(),
                "-c",
                "listen_addresses=127.0.0.1",
                "-c",
                "unix_socket_directories=",
            ])
            .args(["-c", "fsync=off", "-c", "max_connections=100"])
            .stdout(Stdio::null())
            .stderr(std::fs::File::create(folder.path().join("log")).unwrap())
            .spawn()
            .unwrap();
        let postgres = Self { _child: child, folder, port };
        eventually("PostgreSQL answers", Duration::from_secs(30), async || {
            sqlx::PgPool::connect(&postgres.url("postgres")).await.map(drop)
        })
        .await;
        postgres
    }

    /// What it logged so far.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    fn url(&self, database: &str) -> String {
        format!("postgres://styrmin@{}/{database}", self.port.address())
    }

    /// A new, empty database.
    pub async fn database(&self) -> String {
        let name = format!("styrmin_{}", rand::random::<u32>());
        let pool = sqlx::PgPool::connect(&self.url("postgres")).await.unwrap();
        sqlx::query(sqlx::AssertSqlSafe(format!("CREATE DATABASE {name}"))).execute(&pool).await.unwrap();
        self.url(&name)
    }
}

async fn run(command: &mut Command) {
    crate::tools::run(command, b"").await;
}
