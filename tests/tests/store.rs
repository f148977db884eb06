//! The conformance suite of the store: one text, run on SQLite and on PostgreSQL.

use serde_json::json;
use std::collections::BTreeMap;
use std::sync::Arc;
use styrmin_renderer::config::Object;
use styrmin_renderer::spec::{DriverRef, Lifecycle as SpecLifecycle, StyrminDeploymentSpec};
use styrmin_server::store::{
    self, Batch, BatchRows, BatchState, Change, Cluster, Deployment, DeploymentState, DriverVersion, Environment,
    Instance, InstanceState, Lifecycle, OutboxKind, Person, Pushed, Secret, Step, StepState, Store, StoreError, Target,
    Task, TaskState, Token, TokenKind,
};
use styrmin_tests::postgres::Postgres;

type Shared = Arc<dyn Store>;

fn ann() -> Person {
    Person { name: "Ann".into(), email: "ann@example.com".into() }
}

fn target() -> Target {
    Target { repository: "host/r".into(), branch: "main".into() }
}

fn token(id: &str, kind: TokenKind) -> Token {
    Token {
        id: id.into(),
        hash: format!("hash-{id}"),
        kind,
        name: "Ann".into(),
        email: "ann@example.com".into(),
        cluster_id: None,
        created_at: 1,
        revoked_at: None,
    }
}

fn cluster(id: &str, name: &str, path: &str) -> Cluster {
    Cluster {
        id: id.into(),
        name: name.into(),
        config: object(json!({ "fqdn_suffix": "a.io", "n": 1.5, "null": null })),
        version: 1,
        git_url: Some("https://host/r".into()),
        repository: target().repository,
        branch: target().branch,
        path: path.into(),
        credentials: Some(vec![0, 255]),
        age_recipient: None,
        created_at: 5,
    }
}

fn object(value: serde_json::Value) -> Object {
    serde_json::from_value(value).unwrap()
}

fn environment(id: &str, name: &str) -> Environment {
    Environment {
        id: id.into(),
        cluster_id: "cluster".into(),
        name: name.into(),
        config: Object::new(),
        version: 1,
        allocated: 0,
        created_at: 6,
    }
}

fn deployment(id: &str, name: &str) -> Deployment {
    Deployment {
        id: id.into(),
        environment_id: "environment".into(),
        name: name.into(),
        shard: 0,
        driver_name: "web".into(),
        driver_digest: "sha256:1".into(),
        driver_pin: None,
        application_version: "1".into(),
        config: Object::new(),
        parameters: object(json!({ "image": "nginx" })),
        lifecycle: Lifecycle::Running,
        state: DeploymentState::Pending,
        version: 0,
        last_sequence: 0,
        newest_instance_id: None,
        active_instance_id: None,
        created_at: 7,
    }
}

/// The next change of `row`: one more instance with its task.
fn change(row: &Deployment) -> Change {
    let sequence = row.last_sequence + 1;
    let (instance_id, task_id) = (format!("{}-i{sequence:03}", row.id), format!("{}-t{sequence:03}", row.id));
    let spec = StyrminDeploymentSpec {
        deployment_id: "abcdefghijkl".parse().unwrap(),
        instance_id: instance_id.clone(),
        lifecycle: SpecLifecycle::Running,
        driver: DriverRef { name: "web".into(), version: "1.0.0".into(), digest: "sha256:1".into() },
        application_version: "1".into(),
        context: json!({ "a": null, "f": 1.25, "n": 9_007_199_254_740_993_i64 }),
        jobs: Vec::new(),
    };
    let step = |position: i64, state| Step {
        task_id: task_id.clone(),
        position,
        name: format!("step {position}"),
        state,
        attempt: 1,
        message: None,
        started_at: None,
        ended_at: None,
    };
    let task = Task {
        id: task_id.clone(),
        deployment_id: row.id.clone(),
        instance_id: instance_id.clone(),
        sequence,
        workflow: "update".into(),
        state: TaskState::Running,
        message: None,
        author_name: "Ann".into(),
        author_email: "ann@example.com".into(),
        version: 1,
        created_at: 8,
        ended_at: None,
        steps: vec![step(0, StepState::Running), step(1, StepState::Pending)],
    };
    let instance = Instance {
        id: instance_id.clone(),
        deployment_id: row.id.clone(),
        sequence,
        workflow: "update".into(),
        spec,
        origins: BTreeMap::from([("/config/a".into(), styrmin_renderer::config::Level::Cluster)]),
        document: Some("kind: x\n".into()),
        secrets_file: None,
        secrets_stamp: None,
        state: InstanceState::Pending,
        revision: None,
        task_id,
        author_name: "Ann".into(),
        author_email: "ann@example.com".into(),
        created_at: 8,
    };
    Change {
        cluster: ("cluster".into(), 1),
        environment: ("environment".into(), 1),
        deployment: Deployment { last_sequence: sequence, newest_instance_id: Some(instance_id), ..row.clone() },
        set_secrets: Vec::new(),
        remove_secrets: Vec::new(),
        instance: Some((instance, task)),
        target: target(),
        author: ann(),
        now: 8,
    }
}

async fn suite(store: Shared) {
    tokens(&store).await;
    clusters_and_environments(&store).await;
    changes(&store).await;
    versions(&store).await;
    races(&store).await;
    outbox(&store).await;
    names_and_shards(&store).await;
    drivers(&store).await;
}

async fn tokens(store: &Shared) {
    store.ping().await.unwrap();
    assert!(!store.has_administrator().await.unwrap());
    store.insert_token(&token("one", TokenKind::Administrator)).await.unwrap();
    assert!(store.has_administrator().await.unwrap());
    assert!(matches!(store.insert_token(&token("one", TokenKind::Administrator)).await, Err(StoreError::Exists)));
    assert_eq!(store.token("hash-one").await.unwrap(), Some(token("one", TokenKind::Administrator)));
    assert_eq!(store.token("hash-two").await.unwrap(), None);
    let revoked = Token { revoked_at: Some(9), ..token("revoked", TokenKind::Administrator) };
    store.insert_token(&revoked).await.unwrap();
    assert_eq!(store.token("hash-revoked").await.unwrap(), None);
}

async fn clusters_and_environments(store: &Shared) {
    let row = cluster("cluster", "c", "");
    store.insert_cluster(&row, &token("agent", TokenKind::Agent), &ann()).await.unwrap();
    assert_eq!(store.cluster("cluster").await.unwrap(), Some(row.clone()));
    assert_eq!(store.cluster("c").await.unwrap(), Some(row.clone()), "by name");
    assert_eq!(store.cluster("nope").await.unwrap(), None);
    // Name or place taken: nothing of it is stored.
    for (other, agent) in [(cluster("x", "c", "elsewhere"), "a1"), (cluster("x", "x", ""), "a2")] {
        let refused = store.insert_cluster(&other, &token(agent, TokenKind::Agent), &ann()).await;
        assert!(matches!(refused, Err(StoreError::Exists)));
        assert_eq!(store.cluster("x").await.unwrap(), None);
        assert_eq!(store.token(&format!("hash-{agent}")).await.unwrap(), None);
    }
    store.insert_cluster(&cluster("second", "b", "b"), &token("agent2", TokenKind::Agent), &ann()).await.unwrap();
    let names = |rows: Vec<Cluster>| rows.into_iter().map(|row| row.name).collect::<Vec<_>>();
    assert_eq!(names(store.clusters(None, 10).await.unwrap()), ["b", "c"]);
    assert_eq!(names(store.clusters(None, 1).await.unwrap()), ["b"]);
    assert_eq!(names(store.clusters(Some(("b".into(), "second".into())), 10).await.unwrap()), ["c"]);
    assert_eq!(names(store.clusters_in(&target()).await.unwrap()), ["c", "b"]);
    assert_eq!(store.outbox_size().await.unwrap(), 2);

    store.insert_environment(&environment("environment", "e"), &target(), &ann()).await.unwrap();
    let refused = store.insert_environment(&environment("y", "e"), &target(), &ann()).await;
    assert!(matches!(refused, Err(StoreError::Exists)));
    assert_eq!(store.outbox_size().await.unwrap(), 3);
    assert_eq!(store.environment("environment").await.unwrap(), Some(environment("environment", "e")));
    assert_eq!(store.environments(Some("cluster"), None, 10).await.unwrap().len(), 1);
    assert_eq!(store.environments(Some("second"), None, 10).await.unwrap().len(), 0);
    assert_eq!(store.environments(None, None, 10).await.unwrap().len(), 1);
}

async fn changes(store: &Shared) {
    let mut first = change(&deployment("d", "shop"));
    let secret = |text: &[u8]| Secret {
        deployment_id: "d".into(),
        name: "password".into(),
        ciphertext: text.to_vec(),
        fingerprint: format!("f{}", text.len()),
    };
    first.set_secrets = vec![secret(b"one"), Secret { name: "other".into(), ..secret(b"x") }];
    let row = store.change(&first).await.unwrap();
    assert_eq!((row.version, row.shard, row.last_sequence), (1, 0, 1));
    assert_eq!(store.deployment("d").await.unwrap(), Some(row.clone()));
    let (instance, task) = first.instance.clone().unwrap();
    assert_eq!(store.instance(&instance.id).await.unwrap(), Some(instance));
    assert_eq!(store.task(&task.id).await.unwrap(), Some(task));
    assert_eq!(store.secrets("d").await.unwrap().len(), 2);

    let mut second = change(&row);
    second.set_secrets = vec![secret(b"longer")];
    second.remove_secrets = vec!["other".into()];
    second.deployment.config = object(json!({ "env_vars": { "A": "1" } }));
    let row = store.change(&second).await.unwrap();
    assert_eq!((row.version, row.last_sequence), (2, 2));
    assert_eq!(store.secrets("d").await.unwrap(), [secret(b"longer")]);
    let sequences = |rows: Vec<Instance>| rows.into_iter().map(|row| row.sequence).collect::<Vec<_>>();
    assert_eq!(sequences(store.instances("d", None, 10).await.unwrap()), [2, 1]);
    assert_eq!(sequences(store.instances("d", Some(2), 10).await.unwrap()), [1]);
    let ids = |rows: Vec<Task>| rows.into_iter().map(|row| row.id).collect::<Vec<_>>();
    assert_eq!(ids(store.tasks(Some("d"), None, 10).await.unwrap()), ["d-t002", "d-t001"]);
    assert_eq!(ids(store.tasks(None, Some("d-t002"), 10).await.unwrap()), ["d-t001"]);
    assert_eq!(ids(store.running_tasks("d", 1).await.unwrap()), ["d-t001"]);
    assert_eq!(store.deployments(Some("cluster"), None, None, 10).await.unwrap(), std::slice::from_ref(&row));
    assert_eq!(store.deployments(None, Some("environment"), Some(("shop".into(), "d".into())), 10).await.unwrap(), []);
    assert_eq!(store.deployments(Some("second"), None, None, 10).await.unwrap(), []);
}

/// A change whose rows moved leaves nothing.
async fn versions(store: &Shared) {
    let row = store.deployment("d").await.unwrap().unwrap();
    let before = (store.outbox_size().await.unwrap(), store.instances("d", None, 10).await.unwrap().len());
    let stale = Deployment { version: row.version - 1, ..row.clone() };
    let mut cases = vec![change(&stale), change(&row), change(&row), change(&deployment("new", "new"))];
    cases[1].cluster.1 = 7;
    cases[2].environment.1 = 7;
    cases[3].environment.1 = 7;
    for mut case in cases {
        case.set_secrets = vec![Secret {
            deployment_id: case.deployment.id.clone(),
            name: "half".into(),
            ciphertext: vec![1],
            fingerprint: "f".into(),
        }];
        assert!(matches!(store.change(&case).await, Err(StoreError::Conflict)));
    }
    assert_eq!(store.deployment("d").await.unwrap(), Some(row.clone()));
    assert_eq!(store.deployment("new").await.unwrap(), None);
    assert!(store.secrets("d").await.unwrap().iter().all(|secret| secret.name != "half"));
    let after = (store.outbox_size().await.unwrap(), store.instances("d", None, 10).await.unwrap().len());
    assert_eq!(after, before);

    // Configuration of the levels above counts up their version.
    let cluster = store.cluster("cluster").await.unwrap().unwrap();
    let changed = Cluster {
        config: object(json!({ "fqdn_suffix": "b.io" })),
        age_recipient: Some("age1".into()),
        ..cluster.clone()
    };
    store.update_cluster(&changed).await.unwrap();
    assert!(matches!(store.update_cluster(&changed).await, Err(StoreError::Conflict)));
    assert_eq!(store.cluster("cluster").await.unwrap(), Some(Cluster { version: 2, ..changed.clone() }));
    assert!(matches!(store.change(&change(&row)).await, Err(StoreError::Conflict)));
    let environment = store.environment("environment").await.unwrap().unwrap();
    store.update_environment(&environment).await.unwrap();
    assert!(matches!(store.update_environment(&environment).await, Err(StoreError::Conflict)));
}

fn current(mut change: Change) -> Change {
    (change.cluster.1, change.environment.1) = (2, 2);
    change
}

/// Of many changes computed from the same row, one is stored.
async fn races(store: &Shared) {
    let row = store.deployment("d").await.unwrap().unwrap();
    let all = (0..20).map(|_| {
        let (store, change) = (Arc::clone(store), current(change(&row)));
        tokio::spawn(async move { store.change(&change).await })
    });
    let done = futures::future::join_all(all).await;
    let stored = done.iter().filter(|result| matches!(result, Ok(Ok(_)))).count();
    let conflicts = done.iter().filter(|result| matches!(result, Ok(Err(StoreError::Conflict)))).count();
    assert_eq!((stored, conflicts), (1, 19));
    assert_eq!(store.deployment("d").await.unwrap().unwrap().last_sequence, 3);
    // Creations in one environment do not hinder each other.
    let all = (0..20).map(|number| {
        let (store, change) =
            (Arc::clone(store), current(change(&deployment(&format!("r{number}"), &format!("r{number}")))));
        tokio::spawn(async move { store.change(&change).await })
    });
    assert!(futures::future::join_all(all).await.into_iter().all(|result| result.unwrap().is_ok()));
}

async fn outbox(store: &Shared) {
    assert_eq!(store.targets().await.unwrap(), [target()]);
    let rows = store.outbox(&target(), 1000).await.unwrap();
    assert!(rows.windows(2).all(|pair| pair[0].id < pair[1].id), "oldest first");
    assert_eq!(
        rows.iter().take(3).map(|row| row.kind).collect::<Vec<_>>(),
        [OutboxKind::Cluster, OutboxKind::Cluster, OutboxKind::Environment]
    );
    assert_eq!(store.outbox(&target(), 2).await.unwrap().len(), 2);
    let other = Target { branch: "other".into(), ..target() };
    assert_eq!(store.outbox(&other, 10).await.unwrap(), []);

    let ids = ["d-i001", "d-i002", "d-i003", "nope"].map(str::to_owned);
    let places = store.instance_places(&ids).await.unwrap();
    assert_eq!(places.iter().map(|place| place.sequence).collect::<Vec<_>>(), [1, 2, 3]);
    let waiting = store.waiting_instances(&target(), 1000).await.unwrap();
    assert_eq!(waiting.len(), rows.iter().filter(|row| row.kind == OutboxKind::Instance).count());
    assert!(places.iter().all(|place| waiting.contains(place)));
    assert_eq!(store.waiting_instances(&target(), 4).await.unwrap().len(), 1, "three rows before it are no instances");
    let found = store.instances_to_write(&ids).await.unwrap();
    assert_eq!(found.iter().map(|item| item.instance.sequence).collect::<Vec<_>>(), [1, 2, 3]);
    assert_eq!(
        (found[0].cluster_id.as_str(), found[0].environment_id.as_str(), found[0].last_sequence),
        ("cluster", "environment", 3)
    );

    store.explain_waiting(&ids, "why").await.unwrap();
    let task = store.task("d-t003").await.unwrap().unwrap();
    assert_eq!(task.steps[0].message.as_deref(), Some("why"));
    assert_eq!(task.steps[1].message, None, "only what runs waits");

    let waiting: Vec<i64> = rows.iter().filter(|row| ids.contains(&row.subject_id)).map(|row| row.id).collect();
    let batch = |commit: &str, state| Batch {
        commit_id: commit.into(),
        repository: target().repository,
        branch: target().branch,
        base: None,
        rows: BatchRows {
            outbox: waiting.clone(),
            instances: vec!["d-i003".into()],
            superseded: vec!["d-i001".into(), "d-i002".into()],
        },
        state,
        created_at: 9,
    };
    store.prepare_batch(&batch("c1", BatchState::Prepared)).await.unwrap();
    store.abandon_batch(&batch("c1", BatchState::Prepared)).await.unwrap();
    store.prepare_batch(&batch("c2", BatchState::Prepared)).await.unwrap();
    let open = store.open_batches(&target()).await.unwrap();
    let mut abandoned = batch("c1", BatchState::Abandoned);
    abandoned.rows.outbox.clear();
    abandoned.rows.superseded.clear();
    assert_eq!(open, [abandoned, batch("c2", BatchState::Prepared)]);
    assert_eq!(store.open_batches(&other).await.unwrap(), []);

    let mut tasks = store.running_tasks("d", 3).await.unwrap();
    tasks[2].steps[0].state = StepState::Succeeded;
    tasks[0].state = TaskState::Superseded;
    let pushed = Pushed {
        batch: Some("c2".into()),
        target: target(),
        revision: Some("c2".into()),
        rows: batch("c2", BatchState::Prepared).rows,
        tasks: vec![tasks[0].clone(), tasks[2].clone()],
    };
    // A task that moved meanwhile: nothing of the end is stored.
    let mut stale = pushed.clone();
    stale.tasks[1].version = 9;
    assert!(matches!(store.finish_batch(&stale).await, Err(StoreError::Conflict)));
    assert_eq!(store.outbox(&target(), 1000).await.unwrap(), rows);
    store.finish_batch(&pushed).await.unwrap();
    assert_eq!(store.outbox(&target(), 1000).await.unwrap().len(), rows.len() - 3);
    assert_eq!(store.open_batches(&target()).await.unwrap(), []);
    let states = async |id: &str| {
        let instance = store.instance(id).await.unwrap().unwrap();
        (instance.state, instance.revision)
    };
    assert_eq!(states("d-i001").await, (InstanceState::Superseded, None));
    assert_eq!(states("d-i003").await, (InstanceState::Committed, Some("c2".into())));
    assert_eq!(store.deployment("d").await.unwrap().unwrap().state, DeploymentState::Deploying);
    assert_eq!(store.task("d-t001").await.unwrap().unwrap().state, TaskState::Superseded);
    assert_eq!(store.task("d-t003").await.unwrap().unwrap().steps[0].state, StepState::Succeeded);
    store.explain_waiting(&ids, "no longer").await.unwrap();
    assert_eq!(store.task("d-t003").await.unwrap().unwrap().steps[0].message.as_deref(), Some("why"));
}

async fn names_and_shards(store: &Shared) {
    let taken = current(change(&deployment("d2", "shop")));
    assert!(matches!(store.change(&taken).await, Err(StoreError::Exists)));
    let row = store.deployment("d").await.unwrap().unwrap();
    let mut end = current(change(&row));
    end.deployment.lifecycle = Lifecycle::Deleting;
    store.change(&end).await.unwrap();
    store.change(&taken).await.unwrap();

    let mut number = store.environment("environment").await.unwrap().unwrap().allocated;
    let before = store.outbox_size().await.unwrap();
    while number < 251 {
        let row =
            Deployment { state: DeploymentState::Pending, ..deployment(&format!("s{number}"), &format!("s{number}")) };
        let mut made = current(change(&row));
        made.instance = None;
        let stored = store.change(&made).await.unwrap();
        number += 1;
        assert_eq!(stored.shard, i64::from(number > 250), "deployment {number}");
    }
    assert_eq!(store.outbox_size().await.unwrap(), before + 1, "the second shard's Kustomization is asked for");
    assert_eq!(store.environment("environment").await.unwrap().unwrap().shards(), 2);
}

async fn drivers(store: &Shared) {
    let driver = |version: &str, text: &str| DriverVersion {
        digest: format!("sha256:{version}{text}"),
        name: "web".into(),
        version: version.into(),
        files: BTreeMap::from([("driver.styrmin.yml".into(), text.into())]),
        loaded_at: 1,
    };
    store.insert_driver(&driver("1.0.0", "a")).await.unwrap();
    store.insert_driver(&driver("1.0.0", "a")).await.unwrap();
    assert!(matches!(store.insert_driver(&driver("1.0.0", "b")).await, Err(StoreError::Exists)));
    store.insert_driver(&driver("1.1.0", "b")).await.unwrap();
    assert_eq!(store.drivers().await.unwrap(), [driver("1.0.0", "a"), driver("1.1.0", "b")]);
}

#[tokio::test(flavor = "multi_thread")]
async fn sqlite_conforms() {
    let folder = tempfile::tempdir().unwrap();
    let url = format!("sqlite:{}", folder.path().join("x.db").display());
    suite(store::open(&url).await.unwrap()).await;
    // Opened again, everything is there.
    assert!(store::open(&url).await.unwrap().has_administrator().await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn postgresql_conforms() {
    let postgres = Postgres::start().await;
    let url = postgres.database().await;
    suite(store::open(&url).await.unwrap()).await;
    assert!(store::open(&url).await.unwrap().has_administrator().await.unwrap());
}
