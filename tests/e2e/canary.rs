//! A secret that is easy to find, pushed through every way that a change can take, well and badly: it is in no log,
//! error, status, metric, answer, commit or database.

use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;
use styrmin_client::{Client, ClientError};
use styrmin_tests::agent::Agent;
use styrmin_tests::people::Person;
use styrmin_tests::postgres::Postgres;
use styrmin_tests::remote::Remote;
use styrmin_tests::server::{Api as _, Server};
use styrmin_tests::{eventually, git, http};

const LIMIT: Duration = Duration::from_secs(30);
/// In every secret of this test.
const CANARY: &str = "canary-7f3a91";

/// Everything that was said.
#[derive(Default)]
struct Heard(Vec<(String, String)>);

impl Heard {
    fn add(&mut self, place: &str, text: impl Into<String>) {
        self.0.push((place.to_owned(), text.into()));
    }

    fn answer(&mut self, place: &str, answer: Result<Value, ClientError>) -> bool {
        let is_ok = answer.is_ok();
        match answer {
            Ok(data) => self.add(place, data.to_string()),
            Err(error) => self.add(place, format!("{error} {error:?}")),
        }
        is_ok
    }
}

fn bytes(folder: &Path, found: &mut Vec<(String, Vec<u8>)>) {
    for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let path = entry.path();
        if path.is_dir() {
            bytes(&path, found);
        } else {
            found.push((path.display().to_string(), std::fs::read(&path).unwrap()));
        }
    }
}

/// All that a person can ask for.
async fn everything(client: &Client, cluster: &str, heard: &mut Heard) {
    let deployments = client.ok("{ deployments(first: 500) { nodes { id } } }", json!({})).await;
    for row in deployments["deployments"]["nodes"].as_array().unwrap() {
        let query = "query($id: ID!) { deployment(id: $id) { name config parameters values { field value origin } \
            newestInstance { document values { value } } instances { nodes { document author { name } values { value } } } \
            tasks { nodes { message steps { name message } } } timeline { nodes { title message } } \
            edits { nodes { message path author { name } } } } }";
        heard.answer("deployment", client.execute(query, json!({ "id": row["id"] })).await);
    }
    let query = "query($id: ID!) { cluster(id: $id) { config gitUrl ageRecipients decrypts edits { nodes { message path } } agent { identity } } signingKey }";
    heard.answer("cluster", client.execute(query, json!({ "id": cluster })).await);
    heard.answer("viewer", client.execute("{ viewer { name } drivers { name version } }", json!({})).await);
}

async fn run(mut server: Server) {
    let mut heard = Heard::default();
    server.set("STYRMIN_LOG", Some("trace"));
    server.up().await;
    let client = server.client();
    let bare = git::bare(server.folder.path()).await;
    let remote = Remote::start(&bare, &format!("{CANARY}-git")).await;
    let recipient = age::x25519::Identity::generate().to_public().to_string();
    let git_input = json!({ "url": remote.url(), "password": format!("{CANARY}-git") });
    let (cluster, token) = client.cluster(json!({ "name": "c", "ageRecipient": recipient, "git": git_input })).await;
    let environment = client.environment(&cluster, "e").await;
    let secret = |name: &str| format!("{CANARY}-{name}");

    // Ways that end well.
    let create = "mutation($i: CreateDeploymentInput!) { createDeployment(input: $i) { deployment { id } task { id message } } }";
    let input = |name: &str, password: Value| json!({ "environment": environment, "name": name, "driver": "postgresql", "applicationVersion": "17", "parameters": { "password": password } });
    let created = client.execute(create, json!({ "i": input("db", json!(secret("one"))) })).await.unwrap();
    let db = created["createDeployment"]["deployment"]["id"].as_str().unwrap().to_owned();
    heard.add("create", created.to_string());
    server.drained(LIMIT).await;
    let update = "mutation($id: ID!, $p: JSON, $c: ConfigPatch, $b: ID) { updateDeployment(id: $id, input: { parameters: $p, config: $c }, baseInstanceId: $b) { deployment { parameters } task { id } } }";
    let set = async |password: Value| client.execute(update, json!({ "id": db, "p": { "password": password } })).await;
    assert!(heard.answer("update", set(json!(secret("two"))).await));
    server.drained(LIMIT).await;
    let preview = "query($c: ChangeInput!) { previewChange(change: $c) { changes { field old new } document objects { kind name diff } warnings steps } }";
    let change =
        json!({ "updateDeployment": { "id": db, "input": { "parameters": { "password": secret("three") } } } });
    assert!(heard.answer("preview", client.execute(preview, json!({ "c": change })).await));
    let instances =
        client.ok("query($id: ID!) { deployment(id: $id) { instances { nodes { id } } } }", json!({ "id": db })).await;
    let first = instances["deployment"]["instances"]["nodes"][1]["id"].clone();
    let rollback = "mutation($id: ID!, $to: ID!) { rollbackDeployment(id: $id, toInstance: $to) { task { id } } }";
    assert!(heard.answer("rollback", client.execute(rollback, json!({ "id": db, "to": first })).await));
    server.drained(LIMIT).await;

    // Ways that do not.
    for bad in [json!(format!("{}\n", secret("line"))), json!([secret("list")]), json!({ "value": secret("map") })] {
        assert!(!heard.answer("bad value", set(bad).await));
    }
    heard.answer("bad driver", {
        let mut input = input("x", json!(secret("driver")));
        input["driver"] = json!("nothing");
        client.execute(create, json!({ "i": input })).await
    });
    heard.answer("bad name", client.execute(create, json!({ "i": input("db", json!(secret("name"))) })).await);
    heard.answer("bad parameter", {
        let mut input = input("x", json!(secret("other")));
        input["parameters"]["max_connections"] = json!("many");
        client.execute(create, json!({ "i": input })).await
    });
    let variables = json!({ "id": db, "p": { "password": secret("base") }, "b": first });
    assert!(!heard.answer("moved base", client.execute(update, variables).await));
    let variables = json!({ "id": db, "p": { "password": secret("config") }, "c": { "set": { "nothing": 1 } } });
    assert!(!heard.answer("bad config", client.execute(update, variables).await));
    let (poor, _) = client.cluster(json!({ "name": "poor" })).await;
    let there = client.environment(&poor, "e").await;
    let mut nowhere = input("x", json!(secret("no-recipient")));
    nowhere["environment"] = json!(there);
    assert!(!heard.answer("no recipient", client.execute(create, json!({ "i": nowhere })).await));
    let cluster_update =
        "mutation($id: ID!, $g: GitAccessInput) { updateCluster(id: $id, git: $g) { cluster { id } } }";
    for access in [
        json!({ "password": format!("{}\n", secret("git")) }),
        json!({ "sshKey": secret("ssh"), "knownHosts": secret("hosts") }),
        json!({ "ca": secret("ca") }),
        json!({ "proxy": secret("proxy") }),
    ] {
        assert!(
            !heard.answer("bad access", client.execute(cluster_update, json!({ "id": cluster, "g": access })).await)
        );
    }
    // A body that is no JSON, a query that is none, a token that is none.
    for (body, bearer) in [
        (format!("{{\"query\": \"{}", secret("body")), server.token()),
        (json!({ "query": format!("{{ {} }}", secret("query").replace('-', "_")) }).to_string(), server.token()),
        (json!({ "query": "{ viewer { name } }" }).to_string(), secret("token")),
    ] {
        let sent =
            http().post(format!("{}/graphql", server.address())).bearer_auth(bearer).body(body).send().await.unwrap();
        // What somebody sends as a query is shown back to them; it is no secret there.
        let text = sent.text().await.unwrap().replace(&secret("query").replace('-', "_"), "");
        heard.add("refused request", text);
    }
    // The repository refuses, with the token in hand.
    for status in [401, 403, 500] {
        remote.behave(status);
        assert!(heard.answer("while git refuses", set(json!(secret(&format!("status-{status}")))).await));
        tokio::time::sleep(Duration::from_millis(800)).await;
        everything(&client, &cluster, &mut heard).await;
    }
    remote.behave(200);
    server.drained(LIMIT).await;

    // A person puts a secret into Git in clear: theirs is there, ours shows nothing of it.
    let pat = Person::of(bare.to_str().unwrap()).await;
    let document = pat.path(&db);
    pat.write(
        &document.replace("styrmindeployment", "secrets.sops"),
        &format!("stringData: {{password: {}}}\n", secret("clear")),
    );
    pat.edit(&db, |value| value["spec"]["context"]["parameters"]["password"] = json!(secret("document")));
    pat.push("Oops").await;
    client.execute(cluster_update, json!({ "id": cluster })).await.unwrap();
    eventually("it is put back", LIMIT, async || {
        let query = "query($id: ID!) { deployment(id: $id) { edits { nodes { state message } } } }";
        let found = client.ok(query, json!({ "id": db })).await["deployment"]["edits"]["nodes"].clone();
        if found[0]["state"] == "RESTORED" { Ok(()) } else { Err(found) }
    })
    .await;
    let checked = styrmin_tests::child(styrmin_tests::server::program("styrminctl").to_str().unwrap())
        .arg("validate")
        .arg(pat.work())
        .output()
        .await
        .unwrap();
    heard.add("validate", String::from_utf8_lossy(&checked.stdout).into_owned());
    heard.add("validate", String::from_utf8_lossy(&checked.stderr).into_owned());

    // The agent says odd things; then everything ends.
    let mut agent = Agent::new(&server, &token, "agent-1", 1);
    agent.deployments(&[]).await;
    heard.answer("report", agent.report("pods", json!([{ "name": 7 }])).await);
    let delete = "mutation($id: ID!) { deleteDeployment(id: $id) { task { id } } }";
    assert!(heard.answer("delete", client.execute(delete, json!({ "id": db })).await));
    server.drained(LIMIT).await;
    everything(&client, &cluster, &mut heard).await;

    let metrics = http().get(format!("{}/metrics", server.address())).bearer_auth(server.token());
    heard.add("metrics", metrics.send().await.unwrap().text().await.unwrap());
    heard.add("log", server.log());
    // Commits of ours, without what Pat committed and what takes it away again.
    let ours = git::git(&bare, &["log", "--committer=Styrmin", "--format=%an%n%B", "main"]).await;
    heard.add("messages", ours);
    for (path, text) in git::files(&bare).await {
        heard.add(&path, text);
    }
    for (place, text) in &heard.0 {
        assert!(
            !text.contains(CANARY),
            "in {place}: {}",
            text.lines().find(|line| line.contains(CANARY)).unwrap_or(text)
        );
    }
    // At rest: neither in the database nor in any other file but the copy of what Pat committed.
    server.kill().await;
    let mut found = Vec::new();
    bytes(&server.folder.path().join("data"), &mut found);
    for (path, content) in found.iter().filter(|(path, _)| !path.contains("/mirrors/")) {
        assert!(!content.windows(CANARY.len()).any(|window| window == CANARY.as_bytes()), "in {path}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_secret_is_nowhere_with_sqlite() {
    run(Server::new(None)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_secret_is_nowhere_with_postgresql() {
    let postgres = Postgres::start().await;
    run(Server::new(Some(postgres.database().await))).await;
    let log = postgres.log();
    assert!(!log.contains(CANARY), "in the log of the database");
}
