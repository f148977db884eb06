//! Repositories that have grown for years.

use serde_json::json;
use std::fmt::Write as _;
use std::time::Duration;
use styrmin_tests::people::Person;
use styrmin_tests::server::{Api as _, Server};
use styrmin_tests::{eventually, git, tools};

const LIMIT: Duration = Duration::from_secs(120);

/// A repository of 100,000 files and 50,000 commits takes a change, and an edit in it is found.
#[tokio::test(flavor = "multi_thread")]
async fn a_hundred_thousand_files_and_fifty_thousand_commits() {
    let server = Server::start().await;
    let repository = server.folder.path().join("large.git");
    git::git(server.folder.path(), &["init", "--quiet", "--bare", repository.to_str().unwrap()]).await;
    let mut stream = String::new();
    for number in 0..50_000 {
        let message = format!("Change {number}");
        writeln!(stream, "commit refs/heads/main\ncommitter Pat <pat@example.com> {} +0000", 1_600_000_000 + number)
            .unwrap();
        writeln!(stream, "data {}\n{message}", message.len()).unwrap();
        for half in 0..2 {
            let file = number * 2 + half;
            let text = format!("{file}\n");
            write!(
                stream,
                "M 100644 inline apps/{}/{}/{file}.txt\ndata {}\n{text}\n",
                file % 100,
                file / 100 % 100,
                text.len()
            )
            .unwrap();
        }
    }
    tools::run(&mut git::command(&repository, &["fast-import", "--quiet"]), stream.as_bytes()).await;
    assert_eq!(git::commits(&repository).await, 50_000);
    let client = server.client();
    let (cluster, _) = client.cluster(json!({ "name": "c", "git": { "url": repository, "path": "clusters/c" } })).await;
    let environment = client.environment(&cluster, "e").await;
    let (front, _) = client.web(&environment, "front").await;
    server.drained(LIMIT).await;
    client.set_variable(&front, "COLOR", "blue").await.unwrap();
    server.drained(LIMIT).await;
    let pat = Person::of(repository.to_str().unwrap()).await;
    pat.edit(&front, |document| document["spec"]["context"]["instance"]["config"]["env_vars"]["COLOR"] = json!("red"));
    pat.push("Red").await;
    client.set_variable(&front, "SIZE", "xl").await.unwrap();
    eventually("the edit is found", LIMIT, async || {
        let data = client.ok("query($id: ID!) { deployment(id: $id) { config } }", json!({ "id": front })).await;
        let is = data["deployment"]["config"]["env_vars"] == json!({ "COLOR": "red", "SIZE": "xl" });
        if is { Ok(()) } else { Err(data) }
    })
    .await;
    server.drained(LIMIT).await;
    // History and the files of others are whole.
    assert_eq!(git::git(&repository, &["rev-list", "--count", "main", "--", "apps"]).await.trim(), "50000");
    assert_eq!(git::git(&repository, &["ls-tree", "-r", "--name-only", "main:apps"]).await.lines().count(), 100_000);
}

/// What every change leaves in files of their own is packed beside the changes.
#[tokio::test(flavor = "multi_thread")]
async fn upkeep_goes_on_beside_the_changes() {
    let mut server = Server::new(None);
    server.set("STYRMIN_GIT_LOOSE_OBJECTS", Some("300"));
    server.up().await;
    let client = server.client();
    let (cluster, _) = client.cluster(json!({ "name": "c" })).await;
    let environment = client.environment(&cluster, "e").await;
    let (front, _) = client.web(&environment, "front").await;
    server.drained(LIMIT).await;
    let hosted = server.hosted(&cluster);
    let count = async |path: &std::path::Path| -> (usize, usize) {
        let text = git::git(path, &["count-objects", "-v"]).await;
        let field = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().parse().unwrap();
        (field("count:"), field("in-pack:"))
    };
    let mirrors = server.folder.path().join("data/mirrors");
    let mirror = std::fs::read_dir(mirrors).unwrap().next().unwrap().unwrap().path();
    // How many objects there are is estimated from one folder, so each is packed at a moment of its own.
    let packed = async || {
        let (mut least, paths) = (usize::MAX, [&hosted, &mirror]);
        for path in paths {
            least = least.min(count(path).await.1);
        }
        least
    };
    for number in 0..400 {
        client.set_variable(&front, "N", &number.to_string()).await.unwrap();
        server.drained(LIMIT).await;
        if number % 20 == 19 && packed().await > 300 {
            break;
        }
    }
    eventually("both are packed", LIMIT, async || {
        let packed = packed().await;
        if packed > 300 { Ok(()) } else { Err(packed) }
    })
    .await;
    for path in [&hosted, &mirror] {
        git::git(path, &["fsck", "--full", "--strict", "--no-dangling"]).await;
    }
    client.set_variable(&front, "N", "last").await.unwrap();
    server.drained(LIMIT).await;
    let named = git::named(&hosted).await;
    let last =
        client.ok("query($id: ID!) { deployment(id: $id) { newestInstance { id } } }", json!({ "id": front })).await;
    assert_eq!(last["deployment"]["newestInstance"]["id"], named.last().unwrap().instance);
}
