//! Many changes at once: all of them count, in few commits.

use serde_json::json;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::time::Duration;
use styrmin_client::Client;
use styrmin_renderer::yaml;
use styrmin_tests::git;
use styrmin_tests::postgres::Postgres;
use styrmin_tests::server::{Api as _, Server};

/// A server with a cluster in a bare repository of its own whose pushes take 100 ms.
async fn slow(server: &Server) -> (std::path::PathBuf, String) {
    let repository = git::bare(server.folder.path()).await;
    let (cluster, _) = server.client().cluster(json!({ "name": "c", "git": { "url": repository.to_str() } })).await;
    let environment = server.client().environment(&cluster, "e").await;
    server.drained(Duration::from_secs(30)).await;
    git::hook(&repository, "pre-receive", "sleep 0.1");
    (repository, environment)
}

/// One at a time: each keeps both cores busy, and the time limits are meant for one.
static ALONE: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

async fn patches(server: &Server) {
    let _turn = ALONE.lock().await;
    let (repository, environment) = slow(server).await;
    let client = server.client();
    let (deployment, _) = client.web(&environment, "shop").await;
    server.drained(Duration::from_secs(30)).await;
    let before = git::commits(&repository).await;
    let patch = |client: Client, who: usize, number: usize| {
        let deployment = deployment.clone();
        async move { client.set_variable(&deployment, &format!("V{who}_{number}"), &number.to_string()).await }
    };
    let work = (0..2).flat_map(|who| (0..500).map(move |number| (who, number)));
    let all = work.map(|(who, number)| tokio::spawn(patch(client.clone(), who, number)));
    for done in futures::future::join_all(all).await {
        assert!(done.unwrap().unwrap().is_some(), "each patch has a task");
    }
    server.drained(Duration::from_secs(120)).await;

    let file = deployment_file(&repository, &deployment).await;
    let variables = file["spec"]["context"]["instance"]["config"]["env_vars"].as_object().unwrap().clone();
    assert_eq!(variables.len(), 1000);
    for (name, value) in variables {
        assert!(name.ends_with(&format!("_{}", value.as_str().unwrap())), "{name}={value}");
    }
    let commits = git::commits(&repository).await - before;
    assert!(commits <= 100, "{commits} commits for 1000 patches");
    let query = "query($id: ID!) { deployment(id: $id) { newestInstance { sequence state } tasks(first: 1) { nodes { state } } } }";
    let data = client.ok(query, json!({ "id": deployment })).await;
    assert_eq!(data["deployment"]["newestInstance"], json!({ "sequence": 1001, "state": "COMMITTED" }));
    history_is_clean(&client, &repository).await;
}

/// The StyrminDeployment of a deployment at the tip.
async fn deployment_file(repository: &Path, deployment: &str) -> serde_json::Value {
    let files = git::files(repository).await;
    let (_, text) =
        files.iter().find(|(path, _)| path.ends_with(&format!("{deployment}/styrmindeployment.yaml"))).unwrap();
    yaml::from_str(text).unwrap()
}

/// Every instance is named at most once, and the newest of each deployment exactly once.
async fn history_is_clean(client: &Client, repository: &Path) {
    let mut seen: HashMap<String, usize> = HashMap::new();
    let mut newest: BTreeMap<String, i64> = BTreeMap::new();
    for named in git::named(repository).await {
        *seen.entry(named.instance).or_default() += 1;
        let last = newest.entry(named.deployment).or_default();
        assert!(*last < named.sequence, "sequences rise");
        *last = named.sequence;
    }
    assert!(seen.values().all(|count| *count == 1), "{seen:?}");
    let query = "{ deployments(first: 500) { nodes { id newestInstance { id sequence } instances(first: 1) { nodes { state } } } } }";
    for row in client.ok(query, json!({})).await["deployments"]["nodes"].as_array().unwrap() {
        assert_eq!(seen.get(row["newestInstance"]["id"].as_str().unwrap()), Some(&1), "{row}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_patches_of_one_deployment_all_count_on_sqlite() {
    patches(&Server::start().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_patches_of_one_deployment_all_count_on_postgresql() {
    let postgres = Postgres::start().await;
    let mut server = Server::new(Some(postgres.database().await));
    server.up().await;
    patches(&server).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn fifty_deployments_at_once_make_a_handful_of_commits() {
    let server = Server::start().await;
    let (repository, environment) = slow(&server).await;
    let before = git::commits(&repository).await;
    let client = server.client();
    let all = (0..50).map(|number| {
        let (client, environment) = (client.clone(), environment.clone());
        tokio::spawn(async move { client.web(&environment, &format!("d{number}")).await })
    });
    futures::future::join_all(all).await.into_iter().for_each(|created| drop(created.unwrap()));
    server.drained(Duration::from_secs(60)).await;
    let commits = git::commits(&repository).await - before;
    assert!(commits <= 8, "{commits} commits");
    let files = git::files(&repository).await;
    assert_eq!(files.keys().filter(|path| path.ends_with("/styrmindeployment.yaml")).count(), 50);
    history_is_clean(&client, &repository).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_update_changes_one_file_and_the_same_again_changes_nothing() {
    let server = Server::start().await;
    let client = server.client();
    let (cluster, _) = client.cluster(json!({ "name": "c" })).await;
    let environment = client.environment(&cluster, "e").await;
    let repository = server.hosted(&cluster);
    let (one, _) = client.web(&environment, "one").await;
    let (two, _) = client.web(&environment, "two").await;
    server.drained(Duration::from_secs(30)).await;
    let before = git::files(&repository).await;

    assert!(client.set_variable(&one, "A", "1").await.unwrap().is_some());
    server.drained(Duration::from_secs(30)).await;
    let changed = git::git(&repository, &["diff", "--name-only", "main~1", "main"]).await;
    assert_eq!(changed.trim(), format!("environments/{environment}/s0/{one}/styrmindeployment.yaml"));
    let author = git::git(&repository, &["log", "-1", "--format=%an <%ae> %cn", "main"]).await;
    assert_eq!(author.trim(), "Ann Example <ann@example.com> Styrmin");

    let commits = git::commits(&repository).await;
    assert_eq!(client.set_variable(&one, "A", "1").await.unwrap(), None, "no task for no change");
    server.drained(Duration::from_secs(30)).await;
    assert_eq!(git::commits(&repository).await, commits);

    // Delete removes exactly its folder; then the same name again is another deployment.
    assert!(client.delete(&one).await.unwrap().is_some());
    assert_eq!(client.delete(&one).await.unwrap(), None);
    server.drained(Duration::from_secs(30)).await;
    let mut expected = before.clone();
    expected.retain(|path, _| !path.contains(&one));
    assert_eq!(git::files(&repository).await, expected);
    assert!(client.set_variable(&one, "A", "2").await.unwrap_err().to_string().contains("is being deleted"));
    let (again, _) = client.web(&environment, "one").await;
    server.drained(Duration::from_secs(30)).await;
    assert_ne!(again, one);
    let files = git::files(&repository).await;
    assert!(files.contains_key(&format!("environments/{environment}/s0/{again}/styrmindeployment.yaml")));
    assert!(files.contains_key(&format!("environments/{environment}/s0/{two}/styrmindeployment.yaml")));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_base_that_moved_is_a_conflict_that_shows_both_sides() {
    let server = Server::start().await;
    let client = server.client();
    let (cluster, _) = client.cluster(json!({ "name": "c" })).await;
    let environment = client.environment(&cluster, "e").await;
    let (deployment, _) = client.web(&environment, "shop").await;
    let newest = async || {
        let query = "query($id: ID!) { deployment(id: $id) { newestInstance { id } } }";
        client.ok(query, json!({ "id": deployment })).await["deployment"]["newestInstance"]["id"].clone()
    };
    let base = newest().await;
    client.set_variable(&deployment, "A", "1").await.unwrap();
    let query = "mutation($id: ID!, $base: ID, $input: UpdateDeploymentInput!) { updateDeployment(id: $id, baseInstanceId: $base, input: $input) { task { id } } }";
    let input = json!({ "parameters": { "health_path": "/healthz" } });
    let error = client.execute(query, json!({ "id": deployment, "base": base, "input": input })).await.unwrap_err();
    let text = error.to_string();
    assert!(text.contains("you looked at change 1, the newest is change 2 by Ann Example"), "{text}");
    assert!(text.contains("context.instance.config.env_vars.A"), "{text}");
    let styrmin_client::ClientError::Refused { code, .. } = error else { panic!("{error}") };
    assert_eq!(code.as_deref(), Some("CONFLICT"));
    let data = client.ok(query, json!({ "id": deployment, "base": newest().await, "input": input })).await;
    assert!(data["updateDeployment"]["task"]["id"].is_string());
}

/// More than one shard, and a commit so large that its objects go into a pack.
#[tokio::test(flavor = "multi_thread")]
async fn what_waited_long_goes_out_together_however_much_it_is() {
    let _turn = ALONE.lock().await;
    let server = Server::start().await;
    let (repository, environment) = slow(&server).await;
    git::hook(&repository, "pre-receive", "exit 1");
    let before = git::commits(&repository).await;
    let client = server.client();
    for number in 0..260 {
        client.web(&environment, &format!("d{number}")).await;
    }
    std::fs::remove_file(repository.join("hooks/pre-receive")).unwrap();
    server.drained(Duration::from_secs(60)).await;
    // A round that was under way when the hook went may have taken all but the last few.
    let commits = git::commits(&repository).await - before;
    assert!((1..=2).contains(&commits), "{commits} commits");
    git::git(&repository, &["fsck", "--full", "--strict"]).await;
    let files = git::files(&repository).await;
    let count = |shard: &str| {
        files
            .keys()
            .filter(|path| path.contains(&format!("/{shard}/")) && path.ends_with("/styrmindeployment.yaml"))
            .count()
    };
    assert_eq!((count("s0"), count("s1")), (250, 10));
    let kustomizations = &files[&format!("cluster/environments/{environment}.yaml")];
    assert_eq!(kustomizations.matches("kind: Kustomization").count(), 2, "{kustomizations}");
    history_is_clean(&client, &repository).await;
}
