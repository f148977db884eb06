//! Commands of the server's program that do not serve: keys for a new installation, and a copy of everything while
//! the server runs. They write no fact and answer nobody.

use crate::auth;
use crate::clock::{Clock, timestamp};
use crate::repository::{Host, Signer};
use crate::secrets::{ServerKey, private_text};
use crate::settings::Settings;
use crate::store::{self, TokenKind};
use anyhow::{Context as _, bail, ensure};
use serde_json::json;
use std::path::{Path, PathBuf};
use tokio::fs;

/// Says that a folder is a copy of ours, which the next one may replace.
const MANIFEST: &str = "backup.json";
/// Keys in the data folder, which are not elsewhere.
const KEYS: [&str; 3] = ["server.key", "signing.key", "admin-token"];

/// Makes the keys of an installation in a folder: `secret-key`, `signing-key`, `admin-token`, each readable by its
/// owner only. One that is there stays. Gives what was made.
///
/// # Errors
/// When the folder cannot be written, or holds something else under one of these names.
pub fn keys(folder: &Path) -> anyhow::Result<Vec<&'static str>> {
    std::fs::create_dir_all(folder).with_context(|| format!("the folder {}", folder.display()))?;
    let names = ["secret-key", "signing-key", "admin-token"];
    let made = names.into_iter().filter(|name| !folder.join(name).exists()).collect();
    let [secret, signing, token] = names.map(|name| folder.join(name));
    ServerKey::from_file(&secret)?;
    Signer::from_file(&signing)?;
    let text = private_text(&token, || Ok(auth::new_token(TokenKind::Administrator).0));
    let text = text.with_context(|| format!("the file {}", token.display()))?;
    ensure!(auth::is_administrators(text.trim()), "the file {} holds no token of ours", token.display());
    Ok(made)
}

/// Copies the database (SQLite), the repositories that the server hosts and the keys of the data folder, while it
/// runs. `to` does not exist, is empty, or is an earlier copy, which stays until this one is whole.
///
/// # Errors
/// When the database is another one, `to` is something else, or a part cannot be read or written.
pub async fn backup(settings: &Settings, to: &Path, clock: &dyn Clock) -> anyhow::Result<()> {
    let database = settings.database();
    ensure!(
        database.starts_with("sqlite:"),
        "the database is PostgreSQL: copy it with pg_dump, and keep the keys; repositories elsewhere have copies of their own"
    );
    let to = std::path::absolute(to)?;
    let data = std::path::absolute(&settings.data)?;
    ensure!(fs::try_exists(&data).await?, "there is no data folder {} (--data)", data.display());
    // It may lie in the data folder, but may not be a part of it that is copied, nor hold it.
    let resolved = resolve(&to).await;
    let own = fs::canonicalize(&data).await.with_context(|| data.display().to_string())?;
    let inside = ["git", "mirrors"].iter().any(|part| resolved.starts_with(own.join(part)));
    ensure!(
        !own.starts_with(&resolved) && !inside,
        "the folder {} is the server's own: choose another one",
        to.display()
    );
    if fs::try_exists(&to).await? && !fs::try_exists(to.join(MANIFEST)).await? {
        let mut entries = fs::read_dir(&to).await.with_context(|| format!("the folder {}", to.display()))?;
        if entries.next_entry().await?.is_some() {
            bail!("the folder {} is neither empty nor an earlier copy: choose another one", to.display());
        }
    }
    let beside = |suffix: &str| -> anyhow::Result<PathBuf> {
        let name = to.file_name().context("the copy needs a folder with a name")?;
        // Of nobody else's name, nor of another backup's.
        Ok(to.with_file_name(format!(".{}.styrmin-backup-{}.{suffix}", name.display(), std::process::id())))
    };
    let (new, old) = (beside("new")?, beside("old")?);
    remove(&new).await?;
    let what = || format!("the folder {}", new.display());
    fs::create_dir_all(new.join("git")).await.with_context(what)?;
    // What is pushed after this moment is in the repositories, and unknown to the database: such commits are read
    // as any others when the copy is used. The other way round commits would be missed.
    store::copy_sqlite(&database, &new.join("styrmin.db")).await.context("copying the database")?;
    let hosted = Host::new(data.join("git")).copy_all(&new.join("git")).await?;
    for name in KEYS {
        let from = data.join(name);
        if fs::try_exists(&from).await? {
            fs::copy(&from, new.join(name)).await.with_context(|| format!("copying {}", from.display()))?;
        }
    }
    let manifest = json!({ "version": env!("CARGO_PKG_VERSION"), "at": timestamp(clock.now()).to_string(), "repositories": hosted });
    fs::write(new.join(MANIFEST), format!("{manifest:#}\n")).await.with_context(what)?;
    remove(&old).await?;
    if fs::try_exists(&to).await? {
        fs::rename(&to, &old).await.with_context(|| format!("moving {}", to.display()))?;
    }
    fs::rename(&new, &to).await.with_context(what)?;
    remove(&old).await
}

/// A path that need not exist, as it really is.
async fn resolve(path: &Path) -> PathBuf {
    let mut rest = Vec::new();
    for known in path.ancestors() {
        if let Ok(real) = fs::canonicalize(known).await {
            return rest.into_iter().rev().fold(real, |path, name| path.join(name));
        }
        rest.extend(known.file_name());
    }
    path.to_owned()
}

async fn remove(folder: &Path) -> anyhow::Result<()> {
    match fs::remove_dir_all(folder).await {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        other => other.with_context(|| format!("removing {}", folder.display())),
    }
}
