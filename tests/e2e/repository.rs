//! A repository that is not Styrmin's alone: other clusters, other files, other spellings.

use serde_json::json;
use std::time::Duration;
use styrmin_client::Client;
use styrmin_tests::git;
use styrmin_tests::server::{Api as _, Server};

async fn existing(server: &Server) -> std::path::PathBuf {
    let repository = git::bare(server.folder.path()).await;
    let work = server.folder.path().join("seed");
    std::fs::create_dir_all(work.join("cluster")).unwrap();
    std::fs::write(work.join("README.md"), "Ours for years.\n").unwrap();
    std::fs::write(work.join("cluster/namespace.yaml"), "# ours\n").unwrap();
    git::git(&work, &["add", "-A"]).await;
    git::git(&work, &["commit", "--quiet", "-m", "Ours"]).await;
    git::git(&work, &["push", "--quiet", "origin", "HEAD:main"]).await;
    repository
}

async fn shop(client: &Client, cluster: serde_json::Value) -> (String, String) {
    let (cluster, _) = client.cluster(cluster).await;
    let environment = client.environment(&cluster, "e").await;
    let (deployment, _) = client.web(&environment, "shop").await;
    (environment, deployment)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_existing_repository_keeps_every_file_it_has() {
    let server = Server::start().await;
    let repository = existing(&server).await;
    let before = git::files(&repository).await;
    let (environment, deployment) = shop(&server.client(), json!({ "name": "c", "git": { "url": repository } })).await;
    server.drained(Duration::from_secs(30)).await;
    let after = git::files(&repository).await;
    for (path, text) in &before {
        assert_eq!(after.get(path), Some(text), "{path}");
    }
    for path in [
        "CODEOWNERS".to_owned(),
        "flux/styrmin.yaml".to_owned(),
        format!("cluster/environments/{environment}.yaml"),
        format!("environments/{environment}/s0/keep.yaml"),
        format!("environments/{environment}/s0/{deployment}/styrmindeployment.yaml"),
    ] {
        assert!(after.contains_key(&path), "{path}");
    }
    // A file that a person adds to a deployment's folder survives the deployment.
    let work = server.folder.path().join("seed");
    git::git(&work, &["pull", "--quiet", "origin", "main"]).await;
    let theirs = format!("environments/{environment}/s0/{deployment}/notes.md");
    std::fs::write(work.join(&theirs), "why\n").unwrap();
    git::git(&work, &["add", "-A"]).await;
    git::git(&work, &["commit", "--quiet", "-m", "Why"]).await;
    git::git(&work, &["push", "--quiet", "origin", "HEAD:main"]).await;
    server.client().delete(&deployment).await.unwrap();
    server.drained(Duration::from_secs(30)).await;
    let files = git::files(&repository).await;
    assert_eq!(files.keys().filter(|path| path.contains(&deployment)).collect::<Vec<_>>(), [&theirs]);
}

#[tokio::test(flavor = "multi_thread")]
async fn clusters_share_a_repository_in_folders_and_branches_with_one_writer() {
    let server = Server::start().await;
    let repository = existing(&server).await;
    let client = server.client();
    // Two spellings of one repository, and another branch of it.
    let spelled = format!("file://{}/", repository.display());
    let (one, _) = shop(&client, json!({ "name": "one", "git": { "url": repository, "path": "clusters/one" } })).await;
    let (two, _) = shop(&client, json!({ "name": "two", "git": { "url": spelled, "path": "clusters/two" } })).await;
    let (other, _) = shop(&client, json!({ "name": "other", "git": { "url": repository, "branch": "staging" } })).await;
    server.drained(Duration::from_secs(30)).await;
    let files = git::files(&repository).await;
    for (name, environment) in [("one", &one), ("two", &two)] {
        assert!(files.contains_key(&format!("clusters/{name}/environments/{environment}/s0/keep.yaml")));
        let kustomizations = &files[&format!("clusters/{name}/cluster/environments/{environment}.yaml")];
        assert!(kustomizations.contains(&format!("path: ./clusters/{name}/environments/{environment}/s0")));
        assert!(files.keys().any(|path| path.starts_with(&format!("clusters/{name}/charts/web-application-"))));
    }
    assert!(!files.keys().any(|path| path.contains(&other)));
    let staging = git::git(&repository, &["ls-tree", "-r", "--name-only", "staging"]).await;
    assert!(staging.contains(&format!("environments/{other}/s0/keep.yaml")) && !staging.contains(&one));
    assert_eq!(
        std::fs::read_dir(server.folder.path().join("data/mirrors")).unwrap().count(),
        2,
        "a writer for each branch"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn the_author_is_who_changed_and_several_authors_are_all_named() {
    let server = Server::start().await;
    let client = server.client();
    let (cluster, _) = client.cluster(json!({ "name": "c" })).await;
    let environment = client.environment(&cluster, "e").await;
    let query = "mutation { createAdministratorToken(name: \"Bob Builder\", email: \"bob@example.com\") { token } }";
    let token = client.ok(query, json!({})).await["createAdministratorToken"]["token"].as_str().unwrap().to_owned();
    let bob = Client::new(&server.address(), &token).unwrap();
    server.drained(Duration::from_secs(30)).await;
    let repository = server.hosted(&cluster);
    git::hook(&repository, "pre-receive", "sleep 1");
    bob.web(&environment, "first").await;
    tokio::time::sleep(Duration::from_millis(400)).await;
    let (_, _) = (client.web(&environment, "anns").await, bob.web(&environment, "bobs").await);
    server.drained(Duration::from_secs(30)).await;
    let authors = git::git(&repository, &["log", "-2", "--format=%an <%ae>", "main"]).await;
    assert_eq!(authors, "Styrmin <styrmin@styrmin.invalid>\nBob Builder <bob@example.com>\n");
    let named: Vec<String> = git::named(&repository).await.into_iter().map(|named| named.changed_by).collect();
    assert_eq!(named.len(), 3);
    for person in ["Ann Example <ann@example.com>", "Bob Builder <bob@example.com>"] {
        assert!(named[1..].contains(&person.to_owned()), "{named:?}");
    }
}
