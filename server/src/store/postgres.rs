//! PostgreSQL, for several server replicas.

use super::Result;
use sqlx::postgres::PgPoolOptions;
use std::time::Duration;
use tokio::sync::Semaphore;

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

const CONNECTIONS: u32 = 16;
const CHANGES: usize = 8;

pub(super) async fn open(url: &str) -> Result<sql::SqlStore> {
    let pool =
        PgPoolOptions::new().max_connections(CONNECTIONS).acquire_timeout(Duration::from_secs(60)).connect(url).await?;
    sqlx::migrate!("migrations/postgres").run(&pool).await?;
    Ok(sql::SqlStore { writer: pool.clone(), reader: pool, changes: Semaphore::new(CHANGES) })
}
