//! Commits that say what they change, signed so that Flux accepts them and nothing else.

use git2::Repository;
use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;
use styrmin_server::repository::{Signature, Signer, Stamp, commit};
use styrmin_tests::git;
use styrmin_tests::people::Person;
use styrmin_tests::plane::condition;
use styrmin_tests::server::{Api as _, Server};
use styrmin_tests::world::{LIMIT, World};

const SOURCE: [&str; 4] = ["source.toolkit.fluxcd.io/v1", "GitRepository", "flux-system", "styrmin"];

/// Signs the newest commit of a work tree anew, as `git commit --amend -S` would.
fn sign(work: &Path, key: &Signer) -> String {
    let repository = Repository::open(work).unwrap();
    let head = repository.head().unwrap().peel_to_commit().unwrap();
    let author = Signature { name: "Pat".into(), email: "pat@example.com".into() };
    let stamp = Stamp {
        message: head.message().unwrap(),
        author: &author,
        committer: &author,
        seconds: head.time().seconds(),
        signer: Some(key),
    };
    let parent = head.parent_id(0).ok();
    commit(&repository, head.tree_id(), parent, &stamp).unwrap().to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_says_in_words_what_changes() {
    let server = Server::start().await;
    let client = server.client();
    let (cluster, _) = client
        .cluster(
            json!({ "name": "c", "ageRecipient": "age1ql3z7hjy54pw3hyww5ayyfg7zqgvc7w3j2elw8zmrj2kg5sfn9aqmcac8p" }),
        )
        .await;
    let environment = client.environment(&cluster, "e").await;
    let (web, _) = client.web(&environment, "front").await;
    let input = json!({ "environment": environment, "name": "db", "driver": "postgresql", "applicationVersion": "17",
        "parameters": { "password": "first-secret-1" } });
    let (db, _) = client.create(input).await.unwrap();
    server.drained(LIMIT).await;
    let hosted = server.hosted(&cluster);
    let last = async || git::git(&hosted, &["log", "-1", "--format=%an|%cn|%B", "main"]).await;
    client.set_variable(&web, "COLOR", "blue").await.unwrap();
    server.drained(LIMIT).await;
    let text = last().await;
    assert!(
        text.starts_with(
            "Ann Example|Styrmin|Update deployment front (web-application 1.27)\n\n- config.env_vars.COLOR: \"blue\", was not set\n\nStyrmin-Instance: "
        ),
        "{text}"
    );
    let query = "mutation($id: ID!) { upgradeDeployment(id: $id, applicationVersion: \"1.28\") { task { id } } }";
    client.ok(query, json!({ "id": web })).await;
    server.drained(LIMIT).await;
    let text = last().await;
    assert!(text.contains("\n\n- applicationVersion: \"1.27\" → \"1.28\"\n\n"), "{text}");
    let query = "mutation($id: ID!) { updateDeployment(id: $id, input: { parameters: { password: \"second-secret-2\" } }) { task { id } } }";
    client.ok(query, json!({ "id": db })).await;
    server.drained(LIMIT).await;
    let text = last().await;
    assert!(text.contains("\n\n- parameters.password: another secret\n\n"), "{text}");
    assert!(!text.contains("second-secret-2"));
}

#[tokio::test(flavor = "multi_thread")]
async fn people_are_warned_before_flux_refuses_their_commits() {
    let server = Server::start().await;
    let client = server.client();
    let query = "mutation($input: CreateClusterInput!) { createCluster(input: $input) { warnings cluster { id } } }";
    let create = async |name: &str, verification: Value| {
        client.execute(query, json!({ "input": { "name": name, "verification": verification } })).await
    };
    let warned = create("a", json!({})).await.unwrap()["createCluster"]["warnings"].clone();
    assert!(warned[0].as_str().unwrap().contains("add their public keys"), "{warned}");
    let none = create("b", Value::Null).await.unwrap()["createCluster"]["warnings"].clone();
    assert_eq!(none, json!([]));
    let own = client.ok("{ signingKey }", json!({})).await["signingKey"].clone();
    let quiet = create("d", json!({ "trustedKeys": [own] })).await.unwrap()["createCluster"].clone();
    assert_eq!(quiet["warnings"], json!([]));
    server.drained(Duration::from_secs(30)).await;
    let flux = git::files(&server.hosted(quiet["cluster"]["id"].as_str().unwrap())).await["flux/styrmin.yaml"].clone();
    assert!(flux.contains("styrmin.sshpub: ssh-ed25519 ") && flux.contains("trusted-1.sshpub: ssh-ed25519 "), "{flux}");
    let refused = create("e", json!({ "trustedKeys": ["ssh-rsa nonsense"] })).await.unwrap_err().to_string();
    assert!(refused.contains("verification.trusted_keys[0]: is neither an SSH public key"), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn flux_accepts_what_we_or_a_trusted_person_signed_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let trusted = Signer::from_file(&folder.path().join("pat")).unwrap();
    let stranger = Signer::from_file(&folder.path().join("eve")).unwrap();
    let world = World::start_as(|_| {}, json!({ "verification": { "trustedKeys": [trusted.public_key()] } })).await;
    let client = world.client();
    let verified = async |commit: &str, status: &'static str| {
        let end = commit.to_owned();
        let is = move |found: Option<&Value>| {
            found.is_some_and(|found| {
                let has = found["status"]["artifact"]["revision"].as_str().is_some_and(|has| has.ends_with(&end));
                let condition = condition(found, "SourceVerified", status);
                has == (status == "True") && condition.is_some_and(|one| one["message"].as_str().is_some())
            })
        };
        world.plane.until(&SOURCE, LIMIT, is).await
    };
    let (id, task) = client.web(&world.environment, "front").await;
    assert_eq!(world.until_ended(&task).await["state"], "SUCCEEDED");
    verified(&world.head().await, "True").await;

    // A person without a key, a stranger with one: everything stands still until somebody signs again.
    let pat = Person::of(world.repository().to_str().unwrap()).await;
    for key in [None, Some(&stranger)] {
        pat.pull().await;
        pat.write("README.md", &format!("{}\n", rand::random::<u64>()));
        pat.git(&["commit", "--quiet", "-am", "Words"]).await;
        if let Some(key) = key {
            let signed = sign(pat.work(), key);
            pat.git(&["reset", "--quiet", "--hard", &signed]).await;
        }
        pat.git(&["push", "--quiet", "origin", "HEAD:main"]).await;
        world.fetch().await;
        verified(&world.head().await, "False").await;
        let task = client.set_variable(&id, "N", &rand::random::<u64>().to_string()).await.unwrap().unwrap();
        assert_eq!(world.until_ended(&task).await["state"], "SUCCEEDED", "our commit on top brings it in");
    }
    // Somebody whose key is known edits: Flux applies it, and the server takes it over.
    pat.pull().await;
    pat.edit(&id, |document| document["spec"]["context"]["instance"]["config"]["env_vars"]["COLOR"] = json!("red"));
    pat.git(&["commit", "--quiet", "-am", "Red"]).await;
    let signed = sign(pat.work(), &trusted);
    pat.git(&["reset", "--quiet", "--hard", &signed]).await;
    pat.git(&["push", "--quiet", "origin", "HEAD:main"]).await;
    world.fetch().await;
    styrmin_tests::eventually("the edit is adopted", LIMIT, async || {
        let query = "query($id: ID!) { deployment(id: $id) { state config edits { nodes { state } } } }";
        let found = client.ok(query, json!({ "id": id })).await["deployment"].clone();
        let is = found["edits"]["nodes"][0]["state"] == "ADOPTED" && found["state"] == "RUNNING";
        if is { Ok(()) } else { Err(found) }
    })
    .await;
    verified(&world.head().await, "True").await;
}
