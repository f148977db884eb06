//! A newer server takes over what an older one left: the database from every earlier schema. And servers and agents
//! of two versions understand each other, by what they said when it was recorded (`tests/traffic`).

use serde_json::{Value, json};
use sqlx::migrate::Migrator;
use std::path::{Path, PathBuf};
use std::time::Duration;
use styrmin_server::store::{
    self, AgentFacts, EditPolicy, ProposalScope, Snapshot, StatusScope, Store, Target, TaskScope,
};
use styrmin_tests::plane::{Options, Plane, Program};
use styrmin_tests::postgres::Postgres;
use styrmin_tests::server::{Api as _, Server};
use styrmin_tests::world::{self, LIMIT};
use styrmin_tests::{eventually, traffic};

/// What a server of each schema had stored, in the columns that the schema has: one of everything.
const ROWS: [&str; 8] = [
    "INSERT INTO tokens (id, hash, kind, name, email, cluster_id, created_at) VALUES ('t1', 'hash-of-t1', 'agent', 'agent of c', '', 'clusterclust', 1);
     INSERT INTO clusters (id, name, config, version, git_url, repository, branch, path, age_recipient, created_at)
        VALUES ('clusterclust', 'c', '{\"fqdn_suffix\": \"a.example.com\"}', 3, NULL, 'hosted/clusterclust', 'main', '', 'age1recipient', 1);
     INSERT INTO environments (id, cluster_id, name, config, version, allocated, created_at) VALUES ('environmenta', 'clusterclust', 'e', '{}', 1, 1, 1);
     INSERT INTO deployments (id, environment_id, name, shard, driver_name, driver_digest, application_version, config, parameters, lifecycle, state, version, last_sequence, newest_instance_id, active_instance_id, created_at)
        VALUES ('deploymentaa', 'environmenta', 'front', 0, 'web', 'sha256:web', '1.27', '{\"env_vars\": {\"A\": \"b\"}}', '{}', 'running', 'running', 2, 1, 'i1', 'i1', 1);
     INSERT INTO instances (id, deployment_id, sequence, workflow, spec, origins, document, state, revision, task_id, author_name, author_email, created_at)
        VALUES ('i1', 'deploymentaa', 1, 'create', '{\"deploymentId\": \"deploymentaa\", \"instanceId\": \"i1\", \"lifecycle\": \"running\", \"driver\": {\"name\": \"web\", \"version\": \"1.0.0\", \"digest\": \"sha256:web\"}, \"applicationVersion\": \"1.27\", \"context\": {}, \"jobs\": []}', '{}', 'kind: StyrminDeployment', 'active', 'abc', 'a1', 'Ann', 'ann@example.com', 1);
     INSERT INTO tasks (id, deployment_id, instance_id, sequence, workflow, state, author_name, author_email, version, created_at, ended_at) VALUES ('a1', 'deploymentaa', 'i1', 1, 'create', 'succeeded', 'Ann', 'ann@example.com', 1, 1, 2);
     INSERT INTO task_steps (task_id, position, name, state, attempt) VALUES ('a1', 0, 'Push the commit', 'succeeded', 1);
     INSERT INTO outbox (repository, branch, kind, subject_id, author_name, author_email, created_at) VALUES ('hosted/clusterclust', 'main', 'environment', 'environmenta', 'Ann', 'ann@example.com', 1);
     INSERT INTO driver_versions (digest, name, version, files, loaded_at) VALUES ('sha256:web', 'web', '1.0.0', '{}', 1);",
    "INSERT INTO reports (cluster_id, cluster_uid, identity, epoch, sequence, reported_at) VALUES ('clusterclust', 'uid', 'agent-1', 5, 9, 3);
     INSERT INTO statuses (cluster_id, snapshot, kind, namespace, name, deployment_id, uid, deleting, digest, content, updated_at) VALUES ('clusterclust', 'pods', 'Pod', 'n', 'p', 'deploymentaa', '', FALSE, 'd', '{}', 3);
     INSERT INTO revisions (repository, branch, revision, created_at) VALUES ('hosted/clusterclust', 'main', 'abc', 3);",
    "INSERT INTO instances (id, deployment_id, sequence, workflow, spec, origins, state, task_id, author_name, author_email, created_at, sources)
        SELECT 'i0', deployment_id, 0, workflow, spec, origins, 'retired', task_id, author_name, author_email, created_at, '{\"config\": {\"env_vars\": {\"OLD\": \"1\"}}, \"parameters\": {}, \"secrets\": {}}' FROM instances WHERE id = 'i1';",
    "INSERT INTO fan_outs (id, level, subject_id, cluster_id, state, untouched, author_name, author_email, created_at, ended_at) VALUES ('f1', 'cluster', 'clusterclust', 'clusterclust', 'finished', '{\"unchanged\": [\"deploymentaa\"], \"skipped\": [], \"failed\": []}', 'Ann', 'ann@example.com', 4, 5);",
    "INSERT INTO observations (id, deployment_id, at, kind, title) VALUES ('o1', 'deploymentaa', 5, 'phase', 'Ready');",
    "INSERT INTO edits (id, cluster_id, deployment_id, path, kind, state, commit_id, author_name, author_email, reading, created_at) VALUES ('e1', 'clusterclust', 'deploymentaa', 'x', 'changed', 'held', 'def', 'Pat', 'pat@example.com', 'abc..def', 6);
     UPDATE clusters SET edit_policy = 'hold';",
    "INSERT INTO proposals (id, cluster_id, repository, branch, head_branch, title, patches, delivery, state, comment_id, told, version, author_name, author_email, created_at) VALUES ('b1', 'clusterclust', 'hosted/clusterclust', 'main', 'styrmin/p1', 'Change it', '[]', '{}', 'open', 0, FALSE, 1, 'Ann', 'ann@example.com', 7);",
    "INSERT INTO cluster_facts (cluster_id, epoch, facts, skew_ms, said_at) VALUES ('clusterclust', 5, '{\"version\": \"0.1.0\", \"kind\": \"CURRENT\", \"waitsFor\": []}', 12, 8);
     INSERT INTO agent_releases (cluster_id, version, \"values\", released_at) VALUES ('clusterclust', '0.1.0', '{\"replicas\": 2}', 9);",
];

/// The migrations up to a schema, as a server of that time had them.
async fn up_to(database: &str, schema: usize) -> (tempfile::TempDir, Migrator) {
    let source: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("../server/migrations").join(database);
    let mut files: Vec<PathBuf> = std::fs::read_dir(source).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    assert_eq!(files.len(), ROWS.len(), "each schema has rows here");
    let folder = tempfile::tempdir().unwrap();
    for file in &files[..schema] {
        std::fs::copy(file, folder.path().join(file.file_name().unwrap())).unwrap();
    }
    let migrator = Migrator::new(folder.path()).await.unwrap();
    (folder, migrator)
}

/// A database as a server of a schema left it.
async fn left_by(database: &str, url: &str, schema: usize) {
    for now in 1..=schema {
        let (_folder, migrator) = up_to(database, now).await;
        if database == "sqlite" {
            let options = url.parse::<sqlx::sqlite::SqliteConnectOptions>().unwrap().create_if_missing(true);
            let pool = sqlx::SqlitePool::connect_with(options).await.unwrap();
            migrator.run(&pool).await.unwrap();
            sqlx::raw_sql(ROWS[now - 1]).execute(&pool).await.unwrap();
            pool.close().await;
        } else {
            let pool = sqlx::PgPool::connect(url).await.unwrap();
            migrator.run(&pool).await.unwrap();
            sqlx::raw_sql(ROWS[now - 1]).execute(&pool).await.unwrap();
            pool.close().await;
        }
    }
}

/// Everything that was stored is there, as a server of now reads it.
async fn is_whole(store: &dyn Store, schema: usize) {
    let cluster = store.cluster("c").await.unwrap().unwrap();
    assert_eq!((cluster.age_recipients.as_slice(), cluster.version), (&["age1recipient".to_owned()][..], 3));
    assert_eq!(cluster.edit_policy, if schema >= 6 { EditPolicy::Hold } else { EditPolicy::Adopt });
    assert_eq!(store.token("hash-of-t1").await.unwrap().unwrap().cluster_id.as_deref(), Some("clusterclust"));
    let deployment = store.deployment("deploymentaa").await.unwrap().unwrap();
    assert_eq!(json!(deployment.config), json!({ "env_vars": { "A": "b" } }));
    let instance = store.instance("i1").await.unwrap().unwrap();
    assert_eq!((instance.spec.application_version.as_str(), instance.revision.as_deref()), ("1.27", Some("abc")));
    let tasks = store.tasks(TaskScope::Deployment("deploymentaa"), None, 10).await.unwrap();
    assert_eq!((tasks.len(), tasks[0].steps.len()), (1, 1));
    assert_eq!(store.outbox_size().await.unwrap(), 1, "what waited waits");
    let target = Target { repository: "hosted/clusterclust".into(), branch: "main".into() };
    let last = store.last_report("clusterclust").await.unwrap();
    assert_eq!(last.map(|last| last.sequence), (schema >= 2).then_some(9));
    let pods = store.statuses(Snapshot::Pods, StatusScope::Cluster("clusterclust"), None, 10).await.unwrap();
    assert_eq!(pods.len(), usize::from(schema >= 2));
    let head = store.head(&target).await.unwrap().map(|(head, _)| head);
    // What had been pushed counts as read.
    assert_eq!(head, (schema >= 2).then(|| "abc".to_owned()));
    assert_eq!(store.fan_out("f1").await.unwrap().is_some(), schema >= 4);
    assert_eq!(store.edit("e1").await.unwrap().is_some(), schema >= 6);
    let proposals = store.proposals(ProposalScope::Cluster("clusterclust"), false, None, 10).await.unwrap();
    assert_eq!(proposals.len(), usize::from(schema >= 7));
    let older = store.instance("i0").await.unwrap();
    assert_eq!(older.is_some_and(|older| older.sources.is_some()), schema >= 3);
    let release = store.agent_release("clusterclust").await.unwrap();
    assert_eq!(release.map(|release| json!(release.values)), (schema >= 8).then(|| json!({ "replicas": 2 })));
    let facts = store.facts("clusterclust").await.unwrap().map(|said| said.facts);
    let current = AgentFacts { version: "0.1.0".into(), kind: "CURRENT".into(), waits_for: Vec::new() };
    assert_eq!(facts, (schema >= 8).then_some(current));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_of_every_earlier_schema_is_taken_over() {
    let postgres = Postgres::start().await;
    for schema in 1..=ROWS.len() {
        let folder = tempfile::tempdir().unwrap();
        let url = format!("sqlite:{}", folder.path().join("styrmin.db").display());
        left_by("sqlite", &url, schema).await;
        is_whole(store::open(&url).await.unwrap().as_ref(), schema).await;
        let url = postgres.database().await;
        left_by("postgres", &url, schema).await;
        is_whole(store::open(&url).await.unwrap().as_ref(), schema).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_starts_on_the_oldest_database_and_never_goes_back() {
    let mut server = Server::new(None);
    let data = server.folder.path().join("data");
    std::fs::create_dir(&data).unwrap();
    let url = format!("sqlite:{}", data.join("styrmin.db").display());
    left_by("sqlite", &url, 1).await;
    server.up().await;
    let found = server
        .client()
        .ok("{ deployments { nodes { name state cluster: environment { cluster { name } } } } }", json!({}))
        .await;
    assert_eq!(
        found["deployments"]["nodes"],
        json!([{ "name": "front", "state": "RUNNING", "cluster": { "cluster": { "name": "c" } } }])
    );
    server.kill().await;
    // An older server finds a schema that it does not know, says so, and leaves it alone.
    let (_folder, migrator) = up_to("sqlite", 1).await;
    let pool = sqlx::SqlitePool::connect(&url).await.unwrap();
    let refused = migrator.run(&pool).await.unwrap_err().to_string();
    assert!(refused.contains("previously applied but is missing"), "{refused}");
    let tables: Vec<(String,)> =
        sqlx::query_as("SELECT name FROM sqlite_master WHERE name = 'cluster_facts'").fetch_all(&pool).await.unwrap();
    assert_eq!(tables.len(), 1);
    let _: Value = found;
}

/// An agent of the build before, word by word: this server takes all of it.
#[tokio::test(flavor = "multi_thread")]
async fn an_agent_of_the_version_before_works_with_this_server() {
    let server = Server::start().await;
    let (_, token) = server.client().cluster(json!({ "name": "c" })).await;
    let http = styrmin_tests::http();
    let mut kinds = std::collections::BTreeSet::new();
    for exchange in traffic::recorded("agent-before") {
        let field = exchange.field();
        let sent = http.post(format!("{}/graphql", server.address())).bearer_auth(&token).json(&exchange.request);
        let answer = tokio::time::timeout(Duration::from_secs(3), sent.send()).await;
        // Nothing was pushed here, so the server holds the question.
        if field == "newestRevision" && answer.is_err() {
            kinds.insert(field);
            continue;
        }
        let answer: Value = answer.unwrap().unwrap().json().await.unwrap();
        let had_failed = !exchange.response["errors"].is_null();
        assert!(had_failed || answer["errors"].is_null(), "{field}: {answer}");
        if !had_failed {
            is_like(&exchange.response["data"], &answer["data"], &field);
        }
        kinds.insert(field);
    }
    let expected = [
        "newestRevision",
        "reportDeploymentStatuses",
        "reportFluxStatuses",
        "reportPodStatuses",
        "reportRecipients",
        "reportUnchanged",
    ];
    assert_eq!(kinds.iter().map(String::as_str).collect::<Vec<_>>(), expected, "every kind of word was said");
}

/// An answer has every field that the one before had, of the same type.
fn is_like(before: &Value, now: &Value, place: &str) {
    match (before, now) {
        (Value::Object(before), Value::Object(now)) => {
            for (name, value) in before {
                let place = format!("{place}.{name}");
                is_like(value, now.get(name).unwrap_or_else(|| panic!("{place} is missing")), &place);
            }
        }
        // Whether there is one depends on what was pushed.
        (Value::Null | Value::String(_), Value::Null | Value::String(_)) => {}
        _ => assert_eq!(std::mem::discriminant(before), std::mem::discriminant(now), "{place}: {before} and {now}"),
    }
}

/// A server of the build before: it answers what it answered then, and refuses what it does not know.
struct Before {
    answers: Vec<traffic::Exchange>,
}

impl traffic::AsyncTap for Before {
    async fn answer(&self, request: &Value, _: &str, before: usize) -> Value {
        let field = traffic::field(request);
        if field == "newestRevision" {
            tokio::time::sleep(Duration::from_secs(5)).await;
        }
        let of_field: Vec<_> = self.answers.iter().filter(|one| one.field() == field).collect();
        let answer = of_field
            .get(before)
            .or(of_field.last())
            .unwrap_or_else(|| panic!("the server before was never asked {field}"));
        answer.response.clone()
    }
}

/// This agent goes on with a server of the build before, which does not know all that it says.
#[tokio::test(flavor = "multi_thread")]
async fn this_agent_works_with_a_server_of_the_version_before() {
    let plane = Plane::start_with(Options { controllers: false, ..Options::default() }).await;
    world::install_agent(&plane).await;
    plane.namespace("flux-system").await;
    let tap = traffic::Tap::open(Before { answers: traffic::recorded("server-before") }).await;
    let account = world::account(&plane).await;
    let kubeconfig = plane.kubeconfig_of("agent", &account);
    let settings = [
        ("STYRMIN_SERVER_ADDRESS", tap.address.as_str()),
        ("STYRMIN_AGENT_TOKEN", "any"),
        ("STYRMIN_REPORT_INTERVAL", "1"),
        ("STYRMIN_OPERATOR_TIMER", "2"),
    ];
    let agent = Program::start(world::agent("agent", plane.folder(), &kubeconfig, &settings), plane.logs());
    let first = agent.id().await;
    let count = |field: &str| tap.exchanges().iter().filter(|one| one.field() == field).count();
    for field in [
        "reportPodStatuses",
        "reportDeploymentStatuses",
        "reportFluxStatuses",
        "reportUnchanged",
        "newestRevision",
        "reportFacts",
    ] {
        eventually(&format!("the agent says {field}"), LIMIT, async || {
            if count(field) > 0 { Ok(()) } else { Err(tap.exchanges().len()) }
        })
        .await;
    }
    let refused = tap.exchanges().into_iter().find(|one| one.field() == "reportFacts").unwrap();
    assert!(!refused.response["errors"].is_null(), "the server before does not know it: {refused:?}");
    // And goes on, as the same process, asking once more only after a while.
    let before = count("reportUnchanged");
    eventually("it goes on", LIMIT, async || if count("reportUnchanged") > before + 3 { Ok(()) } else { Err(()) })
        .await;
    assert_eq!(agent.id().await, first);
    assert!(count("reportFacts") < 4);
    plane.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_made_while_the_server_runs_is_a_server_again() {
    let server = Server::start().await;
    let client = server.client();
    let recipient = "age1ql3z7hjy54pw3hyww5ayyfg7zqgvc7w3j2elw8zmrj2kg5sfn9aqmcac8p";
    let (cluster, _) = client.cluster(json!({ "name": "c", "ageRecipient": recipient })).await;
    let environment = client.environment(&cluster, "e").await;
    let input = json!({ "environment": environment, "name": "database", "driver": "postgresql", "applicationVersion": "17",
        "parameters": { "password": "kept-in-the-copy" } });
    let (id, _) = client.create(input).await.unwrap();
    server.drained(LIMIT).await;
    let copy = server.folder.path().join("copy");
    let backup = async |to: &Path, database: Option<&str>| {
        let mut command = tokio::process::Command::new(styrmin_tests::server::program("styrmin-server"));
        command.arg("--data").arg(server.folder.path().join("data"));
        if let Some(url) = database {
            command.args(["--database-url", url]);
        }
        let output = command.arg("backup").arg("--to").arg(to).output().await.unwrap();
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    // Twice, while somebody changes something: the second replaces the first.
    let changes = async {
        for number in 0..20 {
            client.set_variable(&id, "N", &number.to_string()).await.unwrap();
        }
    };
    let copies = async {
        for _ in 0..2 {
            let (fine, said) = backup(&copy, None).await;
            assert!(fine, "{said}");
        }
    };
    tokio::join!(changes, copies);
    let names: Vec<String> = std::fs::read_dir(server.folder.path())
        .unwrap()
        .map(|one| one.unwrap().file_name().into_string().unwrap())
        .collect();
    assert!(!names.iter().any(|name| name.contains("styrmin-backup")), "{names:?}");
    // Nor is the server's own folder an earlier copy, even when it began as one.
    let data = server.folder.path().join("data");
    std::fs::write(data.join("backup.json"), "{}").unwrap();
    for own in [data.clone(), data.join("git/x"), server.folder.path().to_owned()] {
        let (fine, said) = backup(&own, None).await;
        assert!(!fine && said.contains("is the server's own"), "{said}");
    }

    // What is something else stays.
    let other = server.folder.path().join("other");
    std::fs::create_dir(&other).unwrap();
    std::fs::write(other.join("letter"), "dear").unwrap();
    let (fine, said) = backup(&other, None).await;
    assert!(!fine && said.contains("is neither empty nor an earlier copy"), "{said}");
    assert_eq!(std::fs::read_dir(&other).unwrap().count(), 1);
    let (fine, said) = backup(&copy, Some("postgres://nowhere/x")).await;
    assert!(!fine && said.contains("pg_dump"), "{said}");

    let mut again = Server::new(None);
    std::fs::rename(&copy, again.folder.path().join("data")).unwrap();
    again.up().await;
    let found = again.client().ok("query($id: ID!) { deployment(id: $id) { name state } }", json!({ "id": id })).await;
    assert_eq!(found["deployment"]["name"], "database");
    // It opens its secrets, and commits on top of what it had.
    again.client().set_variable(&id, "AFTER", "the copy").await.unwrap();
    again.drained(LIMIT).await;
    let files = styrmin_tests::git::files(&again.hosted(&cluster)).await;
    let document = files.iter().find(|(path, _)| path.ends_with("styrmindeployment.yaml")).unwrap().1;
    assert!(document.contains("AFTER"), "{document}");
    assert!(files.iter().any(|(path, text)| path.ends_with("secrets.sops.yaml") && text.contains("ENC[")));
}
