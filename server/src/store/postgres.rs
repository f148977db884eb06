//! PostgreSQL, for several server replicas.

use super::{Notice, Result, Target};
use sqlx::postgres::{PgListener, PgPoolOptions};
use sqlx::{Pool, Transaction};
use std::time::Duration;
use tokio::sync::{Semaphore, mpsc};
use tracing::warn;

#[path = "sql.rs"]
#[expect(clippy::duplicate_mod, reason = "one text of SQL, compiled for each database")]
mod sql;

pub(super) type Db = sqlx::Postgres;

const BEGIN: &str = "BEGIN";
/// Rows that a change was computed from stay as they are until it commits.
macro_rules! for_share {
    ($query:literal) => {
        concat!($query, " FOR SHARE")
    };
}
pub(super) use for_share;
/// Nobody gives the row another key until this commits; its other columns may change.
macro_rules! for_key_share {
    ($query:literal) => {
        concat!($query, " FOR KEY SHARE")
    };
}
pub(super) use for_key_share;

/// The database's clock, in milliseconds.
macro_rules! now_ms {
    () => {
        "CAST(EXTRACT(EPOCH FROM clock_timestamp()) * 1000 AS BIGINT)"
    };
}
pub(super) use now_ms;

/// Whether several processes may use it at a time.
const SHARED: bool = true;
/// Where processes tell each other what they store.
const CHANNEL: &str = "styrmin";
/// Pause before listening again.
const LISTEN_PAUSE: Duration = Duration::from_secs(1);

/// Tells the other processes once the transaction is committed.
async fn tell(tx: &mut Transaction<'static, Db>, notice: &Notice) -> Result<()> {
    let (word, target) = match notice {
        Notice::Waits(target) => ("waits", target),
        Notice::Moved(target) => ("moved", target),
        Notice::Look(target) => ("look", target),
    };
    sqlx::query("SELECT pg_notify($1, $2)")
        .bind(CHANNEL)
        .bind(format!("{word}\n{}\n{}", target.repository, target.branch))
        .execute(&mut **tx)
        .await?;
    Ok(())
}

/// Hears them. What is lost while the connection is costs time only: everybody also looks by themselves.
async fn hear(pool: &Pool<Db>, tell: mpsc::Sender<Notice>) {
    loop {
        let heard = async {
            let mut listener = PgListener::connect_with(pool).await?;
            listener.listen(CHANNEL).await?;
            loop {
                let said = listener.recv().await?;
                let mut parts = said.payload().split('\n').map(str::to_owned);
                let (Some(word), Some(repository), Some(branch)) = (parts.next(), parts.next(), parts.next()) else {
                    continue;
                };
                let target = Target { repository, branch };
                let notice = match word.as_str() {
                    "waits" => Notice::Waits(target),
                    "look" => Notice::Look(target),
                    _ => Notice::Moved(target),
                };
                if tell.send(notice).await.is_err() {
                    return Ok::<(), sqlx::Error>(());
                }
            }
        };
        match heard.await {
            Ok(()) => return,
            Err(error) => warn!(%error, "the database does not tell what other servers store"),
        }
        tokio::time::sleep(LISTEN_PAUSE).await;
    }
}

const CONNECTIONS: u32 = 16;
const CHANGES: usize = 8;

pub(super) async fn open(url: &str) -> Result<sql::SqlStore> {
    let pool =
        PgPoolOptions::new().max_connections(CONNECTIONS).acquire_timeout(Duration::from_secs(60)).connect(url).await?;
    sqlx::migrate!("migrations/postgres").run(&pool).await?;
    Ok(sql::SqlStore { writer: pool.clone(), reader: pool, changes: Semaphore::new(CHANGES) })
}
