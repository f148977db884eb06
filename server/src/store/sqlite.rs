//! The embedded default: one writer connection, many readers, WAL.

use super::{Notice, Result};
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous};
use sqlx::{Connection as _, Pool, Transaction};
use std::str::FromStr;
use std::time::Duration;
use tokio::sync::{Semaphore, mpsc};

#[path = "sql.rs"]
#[expect(clippy::duplicate_mod, reason = "one text of SQL, compiled for each database")]
mod sql;

pub(super) type Db = sqlx::Sqlite;

/// Takes the write lock at once: a transaction that reads first could otherwise fail to upgrade.
const BEGIN: &str = "BEGIN IMMEDIATE";
/// The write lock covers every row already.
macro_rules! for_share {
    ($query:literal) => {
        $query
    };
}
pub(super) use for_share;
/// As above.
macro_rules! for_key_share {
    ($query:literal) => {
        $query
    };
}
pub(super) use for_key_share;

/// The database's clock, in milliseconds.
macro_rules! now_ms {
    () => {
        "CAST(unixepoch('subsec') * 1000 AS INTEGER)"
    };
}
pub(super) use now_ms;

/// Whether several processes may use it at a time.
const SHARED: bool = false;
const READERS: u32 = 8;

/// Nobody else listens.
async fn tell(_: &mut Transaction<'static, Db>, _: &Notice) -> Result<()> {
    Ok(())
}

/// Nobody else tells.
async fn hear(_: &Pool<Db>, _: mpsc::Sender<Notice>) {
    std::future::pending::<()>().await;
}

pub(super) async fn copy(url: &str, to: &std::path::Path) -> Result<()> {
    let options = SqliteConnectOptions::from_str(url)?.busy_timeout(Duration::from_secs(30));
    let mut connection = sqlx::SqliteConnection::connect_with(&options).await?;
    sqlx::query("VACUUM INTO ?").bind(to.to_string_lossy().as_ref()).execute(&mut connection).await?;
    Ok(connection.close().await?)
}

pub(super) async fn open(url: &str) -> Result<sql::SqlStore> {
    let options = SqliteConnectOptions::from_str(url)?
        .create_if_missing(true)
        .journal_mode(SqliteJournalMode::Wal)
        // An accepted change survives a power failure too.
        .synchronous(SqliteSynchronous::Full)
        .foreign_keys(true)
        .busy_timeout(Duration::from_secs(30));
    let pool = |most: u32| SqlitePoolOptions::new().max_connections(most).acquire_timeout(Duration::from_secs(60));
    let writer = pool(1).connect_with(options.clone()).await?;
    sqlx::migrate!("migrations/sqlite").run(&writer).await?;
    let reader = pool(READERS).connect_with(options).await?;
    Ok(sql::SqlStore { writer, reader, changes: Semaphore::new(1) })
}
