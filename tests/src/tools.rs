//! Programs that tests use as oracles: `kubectl`, `sops`, `helm`, `yamlcheck`.

use std::path::PathBuf;
use std::process::Stdio;
use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;

/// The folder of what `tests/control-plane/build` makes.
#[must_use]
pub fn folder() -> PathBuf {
    std::env::var_os("STYRMIN_TEST_CACHE").map_or_else(
        || {
            let cache = std::env::var_os("XDG_CACHE_HOME")
                .map_or_else(|| PathBuf::from(std::env::var_os("HOME").expect("HOME")).join(".cache"), PathBuf::from);
            cache.join("styrmin/control-plane")
        },
        PathBuf::from,
    )
}

/// The program `name` of it.
///
/// # Panics
/// When it was not built: `tests/control-plane/build` does that.
#[must_use]
pub fn tool(name: &str) -> PathBuf {
    let path = folder().join(name);
    assert!(path.is_file(), "{} is missing; run tests/control-plane/build", path.display());
    path
}

/// Runs `command` with `input`; gives its standard output.
///
/// # Panics
/// When it fails.
pub async fn run(command: &mut Command, input: &[u8]) -> Vec<u8> {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let mut stdin = child.stdin.take().unwrap();
    let input = input.to_vec();
    let feed = tokio::spawn(async move {
        let _ = stdin.write_all(&input).await;
    });
    let output = child.wait_with_output().await.unwrap();
    feed.await.unwrap();
    assert!(output.status.success(), "{command:?}: {}\n{}", output.status, String::from_utf8_lossy(&output.stderr));
    output.stdout
}
