//! The conformance suite of the store: one text, run on SQLite and on PostgreSQL.

use futures::future::join_all;
use serde_json::json;
use std::collections::BTreeMap;
use std::sync::Arc;
use styrmin_renderer::config::Object;
use styrmin_renderer::spec::{DriverRef, Lifecycle as SpecLifecycle, StyrminDeploymentSpec};
use styrmin_server::store::{
    self, AgentFacts, AgentRelease, Batch, BatchRows, BatchState, Change, Cluster, ClusterFacts, Confirmations,
    DeliveryRules, Deployment, DeploymentOutcome, DeploymentState, DriverVersion, EditKind, EditPolicy, EditScope,
    EditState, Environment, FanOut, FanOutLevel, FanOutState, GitEdit, Instance, InstanceOutcome, InstanceState,
    ItemState, LastReport, Lead, Lifecycle, MergedItem, Observation, OutboxKind, Person, Proposal, ProposalEnd,
    ProposalItem, ProposalScope, ProposalState, ProposedChange, ProposedEdit, Pushed, Report, Rest, Sealed, Secret,
    Snapshot, Sources, StatusRow, StatusScope, Step, StepState, Store, StoreError, Target, Task, TaskScope, TaskState,
    TimelineKind, Token, TokenKind, Untouched,
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
        delivery: Default::default(),
        forge: None,
        forge_secrets: None,
        id: id.into(),
        name: name.into(),
        config: object(json!({ "fqdn_suffix": "a.io", "n": 1.5, "null": null })),
        version: 1,
        git_url: Some("https://host/r".into()),
        repository: target().repository,
        branch: target().branch,
        path: path.into(),
        credentials: Some(vec![0, 255]),
        age_recipients: Vec::new(),
        edit_policy: EditPolicy::Adopt,
        removal_threshold: 0,
        trusted_keys: Some(vec!["ssh-ed25519 AAAA".into()]),
        created_at: 5,
    }
}

fn object(value: serde_json::Value) -> Object {
    serde_json::from_value(value).unwrap()
}

fn environment(id: &str, name: &str) -> Environment {
    Environment {
        delivery: Default::default(),
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
        fan_out_id: None,
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
        sources: Some(Sources {
            secrets: BTreeMap::from([(
                "password".into(),
                Sealed { ciphertext: "AA==".into(), fingerprint: "f".into() },
            )]),
            ..Sources::default()
        }),
        state: InstanceState::Pending,
        revision: None,
        task_id,
        author_name: "Ann".into(),
        author_email: "ann@example.com".into(),
        created_at: 8,
    };
    Change {
        merged: None,
        cluster: ("cluster".into(), 1),
        environment: ("environment".into(), 1),
        deployment: Deployment { last_sequence: sequence, newest_instance_id: Some(instance_id), ..row.clone() },
        set_secrets: Vec::new(),
        remove_secrets: Vec::new(),
        instance: Some((instance, task)),
        target: target(),
        fan_out: None,
        edit: None,
        author: ann(),
        now: 8,
    }
}

fn fan_out(id: &str, level: FanOutLevel) -> FanOut {
    let subject_id = if level == FanOutLevel::Cluster { "cluster" } else { "environment" };
    FanOut {
        proposal_id: None,
        id: id.into(),
        level,
        subject_id: subject_id.into(),
        cluster_id: "cluster".into(),
        state: FanOutState::Running,
        untouched: Untouched::default(),
        author_name: "Ann".into(),
        author_email: "ann@example.com".into(),
        created_at: 9,
        ended_at: None,
    }
}

async fn suite(store: Shared, shared: bool) {
    tokens(&store).await;
    clusters_and_environments(&store).await;
    changes(&store).await;
    versions(&store).await;
    races(&store).await;
    outbox(&store).await;
    statuses(&store).await;
    outcomes(&store).await;
    names_and_shards(&store).await;
    confirmations(&store).await;
    fan_outs(&store).await;
    history(&store).await;
    drivers(&store).await;
    edits(&store).await;
    reviews(&store).await;
    agents(&store).await;
    leads(&store, shared).await;
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

async fn agents(store: &Shared) {
    // Another token takes the place of all that the cluster's agent had, and of no other's.
    let of = |id: &str, cluster: &str, at| Token {
        cluster_id: Some(cluster.into()),
        created_at: at,
        ..token(id, TokenKind::Agent)
    };
    store.insert_token(&of("old", "cluster", 1)).await.unwrap();
    store.insert_token(&of("others", "second", 1)).await.unwrap();
    store.replace_agent_token(&of("new", "cluster", 5)).await.unwrap();
    assert_eq!(store.token("hash-old").await.unwrap(), None);
    assert!(store.token("hash-new").await.unwrap().is_some() && store.token("hash-others").await.unwrap().is_some());
    // Nothing is revoked when the new one cannot be stored.
    assert!(matches!(store.replace_agent_token(&of("others", "cluster", 6)).await, Err(StoreError::Exists)));
    assert!(store.token("hash-new").await.unwrap().is_some());

    // What an agent says of itself counts unless one of a later epoch has spoken.
    let facts = |epoch, version: &str| ClusterFacts {
        cluster_id: "cluster".into(),
        epoch,
        facts: AgentFacts { version: version.into(), kind: "CURRENT".into(), waits_for: vec!["X".into()] },
        skew_ms: -3,
        said_at: 7,
    };
    assert_eq!(store.facts("cluster").await.unwrap(), None);
    for (epoch, version) in [(2, "b"), (1, "a"), (2, "c")] {
        store.set_facts(&facts(epoch, version)).await.unwrap();
    }
    assert_eq!(store.facts("cluster").await.unwrap(), Some(facts(2, "c")));

    let release = |version: &str, replicas: i64| AgentRelease {
        cluster_id: "cluster".into(),
        version: version.into(),
        values: object(json!({ "replicas": replicas })),
        released_at: 8,
    };
    assert_eq!(store.agent_release("cluster").await.unwrap(), None);
    let before = store.outbox_size().await.unwrap();
    for number in [1, 2] {
        store.set_agent_release(&release("1", number), &target(), &ann()).await.unwrap();
    }
    assert_eq!(store.agent_release("cluster").await.unwrap(), Some(release("1", 2)));
    assert_eq!(store.outbox_size().await.unwrap(), before + 2);
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
    assert_eq!(ids(store.tasks(TaskScope::Deployment("d"), None, 10).await.unwrap()), ["d-t002", "d-t001"]);
    assert_eq!(ids(store.tasks(TaskScope::All, Some("d-t002"), 10).await.unwrap()), ["d-t001"]);
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
        age_recipients: vec!["age1".into()],
        ..cluster.clone()
    };
    let (begun, other) = (fan_out("a1", FanOutLevel::Cluster), fan_out("a2", FanOutLevel::Environment));
    store.update_cluster(&changed, &begun).await.unwrap();
    assert!(matches!(store.update_cluster(&changed, &other).await, Err(StoreError::Conflict)));
    assert_eq!(store.cluster("cluster").await.unwrap(), Some(Cluster { version: 2, ..changed.clone() }));
    assert!(matches!(store.change(&change(&row)).await, Err(StoreError::Conflict)));
    let environment = store.environment("environment").await.unwrap().unwrap();
    store.update_environment(&environment, &other).await.unwrap();
    let third = fan_out("a3", FanOutLevel::Environment);
    assert!(matches!(store.update_environment(&environment, &third).await, Err(StoreError::Conflict)));
    assert_eq!(store.running_fan_outs().await.unwrap(), [begun, other], "a conflict begins none");
}

fn current(mut change: Change) -> Change {
    (change.cluster.1, change.environment.1) = (2, 2);
    change
}

fn other() -> Target {
    Target { branch: "elsewhere".into(), ..target() }
}

async fn lead(store: &Shared) -> Lead {
    store.lead("us", 60_000).await.unwrap().unwrap()
}

/// Of two processes one writes, and the word of the one before counts no more. `shared`: both may be alive.
async fn leads(store: &Shared, shared: bool) {
    store.resign(&lead(store).await).await.unwrap();
    let first = store.lead("a", 100).await.unwrap().unwrap();
    assert_eq!(store.lead("a", 60_000).await.unwrap(), Some(first.clone()), "kept");
    let set = async |lead: &Lead| store.set_head(&other(), "c1", lead).await;
    set(&first).await.unwrap();
    assert_eq!(store.head(&other()).await.unwrap(), Some(("c1".into(), 0)));
    set(&first).await.unwrap();
    assert_eq!(store.head(&other()).await.unwrap(), Some(("c1".into(), 1)));
    if shared {
        assert_eq!(store.lead("b", 60_000).await.unwrap(), None, "it is another's");
        store.resign(&first).await.unwrap();
    }
    let second = store.lead("b", 60_000).await.unwrap().unwrap();
    assert_eq!(second.epoch, first.epoch + 1);
    assert!(matches!(set(&first).await, Err(StoreError::Fenced)));
    let pushed = Pushed {
        batch: None,
        target: other(),
        revision: None,
        rows: BatchRows::default(),
        tasks: Vec::new(),
        lead: first.clone(),
    };
    assert!(matches!(store.finish_batch(&pushed).await, Err(StoreError::Fenced)));
    let edit = edit("x", EditState::Noted);
    let stale = GitEdit { lead: Some(first.clone()), ..edit.clone() };
    assert!(matches!(store.record_edits(&[stale], &other(), &ann()).await, Err(StoreError::Fenced)));
    assert_eq!(store.edit("x").await.unwrap(), None);
    store.resign(&first).await.unwrap();
    set(&second).await.unwrap();
    store.resign(&second).await.unwrap();
}

fn edit(id: &str, state: EditState) -> GitEdit {
    GitEdit {
        id: id.into(),
        cluster_id: "cluster".into(),
        deployment_id: Some("d".into()),
        path: "p".into(),
        kind: EditKind::Changed,
        state,
        commit_id: "c".into(),
        author_name: "Pat".into(),
        author_email: "pat@example.com".into(),
        reading: id.into(),
        content: None,
        message: None,
        task_id: None,
        created_at: 10,
        decided_at: None,
        lead: None,
    }
}

/// Edits that keep changes back, one decision for each, and of one file one open edit.
async fn edits(store: &Shared) {
    let row = store.change(&current(change(&deployment("e", "e")))).await.unwrap();
    let of = |id: &str, state| GitEdit { deployment_id: Some("e".into()), ..edit(id, state) };
    let waiting = async || {
        let rows = store.outbox(&target(), 1000).await.unwrap();
        let is_its = |row: &&store::OutboxRow| row.subject_id.starts_with("e-i") || row.kind == OutboxKind::Restore;
        rows.iter().filter(is_its).map(|row| row.subject_id.clone()).collect::<Vec<_>>()
    };
    assert_eq!(waiting().await, ["e-i001"]);
    store.record_edits(&[of("1", EditState::Held)], &target(), &ann()).await.unwrap();
    assert_eq!(waiting().await, Vec::<String>::new(), "what waited is kept back");
    store.change(&current(change(&row))).await.unwrap();
    assert_eq!(waiting().await, Vec::<String>::new(), "and what comes");
    // A newer edit of the same file takes its place; nobody decides about the older one any more.
    store.record_edits(&[of("2", EditState::Held)], &target(), &ann()).await.unwrap();
    assert_eq!(store.edit("1").await.unwrap().unwrap().state, EditState::Superseded);
    let late = store.record_edits(&[of("1", EditState::Restoring)], &target(), &ann()).await;
    assert!(matches!(late, Err(StoreError::Conflict)), "{late:?}");
    assert_eq!(store.edit("2").await.unwrap().unwrap().state, EditState::Held, "nothing of it is stored");
    let open = store.edits(EditScope::Open("cluster"), None, 10).await.unwrap();
    assert_eq!(open.iter().map(|edit| edit.id.as_str()).collect::<Vec<_>>(), ["2"]);
    store.record_edits(&[of("2", EditState::Restoring)], &target(), &ann()).await.unwrap();
    assert_eq!(waiting().await, ["e-i001", "e-i002", "2"]);
    let twice = GitEdit { reading: "2".into(), ..of("3", EditState::Noted) };
    assert!(store.record_edits(&[twice], &target(), &ann()).await.is_err(), "one file is found once in a reading");
    assert_eq!(store.edits_of("cluster", "2").await.unwrap(), ["p"]);
    store.record_edits(&[of("4", EditState::Held)], &target(), &ann()).await.unwrap();
    store.close_edits("cluster", &["p".into()], 11, None).await.unwrap();
    assert_eq!(store.edit("4").await.unwrap().unwrap().state, EditState::Superseded);
    assert_eq!(waiting().await[..2], ["e-i001", "e-i002"]);
    let timeline = store.timeline("e", None, 100).await.unwrap();
    let told = timeline.iter().filter(|entry| entry.kind == TimelineKind::Edited).count();
    assert_eq!(told, 3, "{timeline:?}");
}

fn proposal(id: &str, own: bool) -> Proposal {
    Proposal {
        id: id.into(),
        cluster_id: "cluster".into(),
        repository: target().repository,
        branch: target().branch,
        head_branch: format!("styrmin/{id}"),
        title: "t".into(),
        level: (!own).then(|| "environment".into()),
        subject_id: (!own).then(|| "environment".into()),
        patches: Vec::new(),
        fan_out_id: None,
        delivery: DeliveryRules { reviewers: Some(vec!["rita".into()]), ..DeliveryRules::default() },
        state: ProposalState::Open,
        head: None,
        number: None,
        url: None,
        message: None,
        described: None,
        comment_id: 0,
        told: false,
        version: 0,
        author_name: "Ann".into(),
        author_email: "ann@example.com".into(),
        created_at: 9,
        ended_at: None,
    }
}

/// What waits for a review: beside the rows, one of its own for each deployment, and taken over once.
async fn reviews(store: &Shared) {
    let row = store.change(&current(change(&deployment("rv", "rv")))).await.unwrap();
    let stored = |row: &Deployment, proposal: &str, edits: usize| {
        let of = current(change(row));
        let (mut instance, task) = of.instance.unwrap();
        instance.state = InstanceState::Proposed;
        let item = ProposalItem {
            proposal_id: proposal.into(),
            deployment_id: row.id.clone(),
            edits: vec![ProposedEdit::default(); edits],
            instance_id: instance.id.clone(),
            task_id: task.id.clone(),
            base_instance_id: row.newest_instance_id.clone(),
            pushed_instance_id: None,
            state: ItemState::Open,
        };
        let deployment = Deployment { last_sequence: instance.sequence, ..row.clone() };
        let (cluster, environment) = (of.cluster, of.environment);
        ProposedChange { cluster, environment, deployment, instance: (instance, task), item, superseded: Vec::new() }
    };
    store.propose(&proposal("p1", true), &[stored(&row, "p1", 1)], None).await.unwrap();
    let now = store.deployment("rv").await.unwrap().unwrap();
    assert_eq!(
        (now.newest_instance_id.as_ref(), now.config.clone()),
        (row.newest_instance_id.as_ref(), row.config.clone())
    );
    assert_eq!((now.last_sequence, now.version), (row.last_sequence + 1, row.version + 1));
    let known = store.own_proposal("rv").await.unwrap().unwrap();
    assert_eq!(known.delivery.reviewers.as_deref(), Some(&["rita".to_owned()][..]));
    let stale = store.propose(&known, &[stored(&row, "p1", 2)], None).await;
    assert!(matches!(stale, Err(StoreError::Conflict)), "the deployment moved: {stale:?}");
    let second = store.propose(&proposal("p2", true), &[stored(&now, "p2", 1)], None).await;
    assert!(matches!(second, Err(StoreError::Conflict)), "one of its own: {second:?}");
    assert!(store.proposal("p2").await.unwrap().is_none(), "nothing of it is stored");
    // Reports and pushes say nothing about it.
    let is_its = |task: &Task| task.deployment_id == "rv" && task.instance_id == "rv-i002";
    assert!(!store.running_in("cluster").await.unwrap().iter().any(|running| is_its(&running.task)));
    assert!(!store.running_tasks("rv", 9).await.unwrap().iter().any(is_its));
    // A second wish, and the branch that holds the first.
    let lead = lead(store).await;
    let items = store.proposal_items("p1").await.unwrap();
    let seen = Proposal { head: Some("c1".into()), ..store.proposal("p1").await.unwrap().unwrap() };
    store.attend(&seen, Some(&items), &lead).await.unwrap();
    let old = Lead { epoch: lead.epoch + 1, ..lead.clone() };
    let fenced = store.attend(&seen, None, &old).await;
    assert!(matches!(fenced, Err(StoreError::Fenced)), "{fenced:?}");
    let known = store.proposal("p1").await.unwrap().unwrap();
    let mut older = store.task("rv-t002").await.unwrap().unwrap();
    older.state = TaskState::Superseded;
    let next = ProposedChange { superseded: vec![older], ..stored(&now, "p1", 2) };
    store.propose(&known, &[next], None).await.unwrap();
    let held = store.item_of_instance("rv-i002").await.unwrap().unwrap();
    let item = &held.item;
    assert_eq!((item.instance_id.as_str(), item.edits.len(), held.held_edits), ("rv-i003", 2, 1));
    // The branch is merged as it was: the first wish counts, the second stays under another branch.
    let now = store.deployment("rv").await.unwrap().unwrap();
    let merged = MergedItem {
        proposal_id: "p1".into(),
        deployment_id: "rv".into(),
        instance_id: None,
        revision: "m1".into(),
        tasks: Vec::new(),
        rest: Some(Rest { edits: 1, branch: "styrmin/rest".into(), merged_id: "p1-merged".into() }),
        lead: Some(lead.clone()),
    };
    let now = store.change(&Change { merged: Some(merged), ..current(change(&now)) }).await.unwrap();
    let (rest, item) =
        (store.proposal("p1").await.unwrap().unwrap(), store.proposal_items("p1").await.unwrap().remove(0));
    assert_eq!((rest.state, rest.head_branch.as_str(), rest.head), (ProposalState::Open, "styrmin/rest", None));
    assert_eq!((item.state, item.edits.len(), item.pushed_instance_id), (ItemState::Open, 1, None));
    let stands = store.proposal("p1-merged").await.unwrap().unwrap();
    assert_eq!((stands.state, stands.head.as_deref()), (ProposalState::Merged, Some("c1")), "with the request");
    assert_eq!(
        store.proposal_items("p1-merged").await.unwrap()[0].instance_id,
        now.newest_instance_id.clone().unwrap()
    );
    assert_eq!(store.item_of_instance("rv-i002").await.unwrap(), None);
    // It is merged as it is: the very instance is the newest.
    let mut task = store.task("rv-t003").await.unwrap().unwrap();
    task.message = Some("merged".into());
    let merged = MergedItem {
        proposal_id: "p1".into(),
        deployment_id: "rv".into(),
        instance_id: Some("rv-i003".into()),
        revision: "m2".into(),
        tasks: vec![task],
        rest: None,
        lead: Some(lead.clone()),
    };
    let take = Change {
        instance: None,
        deployment: Deployment {
            newest_instance_id: Some("rv-i003".into()),
            state: DeploymentState::Deploying,
            ..now.clone()
        },
        merged: Some(merged),
        ..current(change(&now))
    };
    store.change(&take).await.unwrap();
    let again = store.change(&Change { deployment: store.deployment("rv").await.unwrap().unwrap(), ..take }).await;
    assert!(matches!(again, Err(StoreError::Conflict)), "it is taken over once: {again:?}");
    let instance = store.instance("rv-i003").await.unwrap().unwrap();
    assert_eq!((instance.state, instance.revision.as_deref()), (InstanceState::Committed, Some("m2")));
    assert_eq!(store.proposal("p1").await.unwrap().unwrap().state, ProposalState::Merged);
    // One that is closed ends what never was.
    let fresh = deployment("never", "never");
    store.propose(&proposal("p3", true), &[stored(&fresh, "p3", 1)], None).await.unwrap();
    let mut task = store.task("never-t001").await.unwrap().unwrap();
    task.state = TaskState::Rejected;
    let closed =
        Proposal { state: ProposalState::Closed, ended_at: Some(10), ..store.proposal("p3").await.unwrap().unwrap() };
    store.end_proposal(&ProposalEnd { proposal: closed, anew: false, tasks: vec![task] }).await.unwrap();
    let gone = store.deployment("never").await.unwrap().unwrap();
    assert_eq!((gone.lifecycle, gone.state), (Lifecycle::Deleting, DeploymentState::Deleted));
    assert_eq!(store.instance("never-i001").await.unwrap().unwrap().state, InstanceState::Rejected);
    // One of each configuration, and its row counts from the merge on.
    store.propose(&proposal("p4", false), &[], None).await.unwrap();
    let other = store.propose(&proposal("p5", false), &[], None).await;
    assert!(matches!(other, Err(StoreError::Conflict)), "{other:?}");
    let open = store.proposals(ProposalScope::Cluster("cluster"), true, Some("z"), 10).await.unwrap();
    assert_eq!(open.iter().map(|found| found.id.as_str()).collect::<Vec<_>>(), ["p4"]);
}

/// The timeline of a deployment, and what is forgotten of it.
async fn history(store: &Shared) {
    let mut row = store.change(&current(change(&deployment("h", "h")))).await.unwrap();
    for _ in 0..3 {
        row = store.change(&current(change(&row))).await.unwrap();
    }
    // The first three have ended, the second of them with a commit.
    for (sequence, at) in [(1, 100), (2, 200), (3, 300)] {
        let mut task = store.task(&format!("h-t{sequence:03}")).await.unwrap().unwrap();
        (task.state, task.message, task.ended_at) = (TaskState::Superseded, Some("by a newer one".into()), Some(at));
        if sequence == 2 {
            (task.steps[0].state, task.steps[0].ended_at) = (StepState::Succeeded, Some(150));
        }
        let pushed = Pushed {
            batch: None,
            target: target(),
            revision: None,
            rows: BatchRows::default(),
            tasks: vec![task],
            lead: lead(store).await,
        };
        store.finish_batch(&pushed).await.unwrap();
    }
    let mut report = report(Snapshot::Deployments, 0);
    let observation = |id: &str, at| Observation {
        id: id.into(),
        deployment_id: "h".into(),
        at,
        kind: TimelineKind::Phase,
        title: "Ready".into(),
        message: None,
    };
    report.last = store.last_report("cluster").await.unwrap().map(|last| (last.epoch, last.sequence));
    (report.row.epoch, report.row.sequence) = (900, 1);
    report.observations = vec![observation("o1", 120), observation("o2", 250)];
    store.record_report(&report).await.unwrap();

    let all = store.timeline("h", None, 100).await.unwrap();
    let short: Vec<(i64, &str)> = all.iter().map(|entry| (entry.at, entry.kind.as_str())).collect();
    let asked = (8, "asked");
    assert_eq!(
        short,
        [
            (300, "ended"),
            (250, "phase"),
            (200, "ended"),
            (150, "committed"),
            (120, "phase"),
            (100, "ended"),
            asked,
            asked,
            asked,
            asked
        ]
    );
    assert_eq!((all[0].title.as_str(), all[0].message.as_deref()), ("superseded", Some("by a newer one")));
    assert_eq!(all[1].task_id, None);
    // Page by page it is the same.
    let (mut paged, mut before) = (Vec::new(), None);
    loop {
        let page = store.timeline("h", before.take(), 3).await.unwrap();
        let Some(last) = page.last() else { break };
        before = Some((last.at, last.key.clone()));
        paged.extend(page);
    }
    assert_eq!(paged, all);

    // Older than 260: the newest two stay in any case, and so does what is on its way.
    while store.forget(260, 2, 1).await.unwrap() > 0 {}
    let sequences: Vec<i64> =
        store.instances("h", None, 10).await.unwrap().into_iter().map(|instance| instance.sequence).collect();
    assert_eq!(sequences, [4, 3]);
    let kinds: Vec<i64> = store.timeline("h", None, 100).await.unwrap().into_iter().map(|entry| entry.at).collect();
    assert_eq!(kinds, [300, 8, 8]);
    assert_eq!(store.fan_out("a1").await.unwrap(), None, "it had ended before that");
    assert_eq!(store.fan_out("a2").await.unwrap().map(|found| found.state), Some(FanOutState::Running));
    assert_eq!(store.forget(260, 2, 10).await.unwrap(), 0);
}

/// Changes of a fan-out: those whose rows moved are left out, and the others wait until it has ended.
async fn fan_outs(store: &Shared) {
    let mut rows = Vec::new();
    for id in ["f1", "f2", "f3"] {
        let mut made = current(change(&deployment(id, id)));
        let (deployment_id, fingerprint) = (id.to_owned(), "f".to_owned());
        made.set_secrets = vec![Secret { deployment_id, name: "password".into(), ciphertext: vec![1], fingerprint }];
        rows.push(store.change(&made).await.unwrap());
    }
    let waiting = async || store.outbox(&target(), 1000).await.unwrap().len();
    let before = waiting().await;
    let stale = Deployment { version: 7, ..rows[1].clone() };
    let changes = [&rows[0], &stale, &rows[2]].map(|row| {
        let mut change = current(change(row));
        change.fan_out = Some("a1".into());
        if let Some((_, task)) = &mut change.instance {
            task.fan_out_id = Some("a1".into());
        }
        change
    });
    assert_eq!(store.change_all(&changes).await.unwrap(), [true, false, true]);
    let after: Vec<i64> =
        join_all(["f1", "f2", "f3"].map(async |id| store.deployment(id).await.unwrap().unwrap().last_sequence)).await;
    assert_eq!(after, [2, 1, 2]);
    assert_eq!(waiting().await, before, "held back");
    let known = store.waiting_instances(&target(), 1000).await.unwrap();
    assert!(known.iter().all(|place| place.id != "f1-i002"));
    assert_eq!(store.fan_out_progress("a1").await.unwrap(), [("running".to_owned(), 2)]);
    let tasks = store.tasks(TaskScope::FanOut("a1"), None, 10).await.unwrap();
    assert_eq!(tasks.iter().map(|task| task.id.as_str()).collect::<Vec<_>>(), ["f3-t002", "f1-t002"]);

    for level in [FanOutLevel::Cluster, FanOutLevel::Environment] {
        let concerned = store.concerned(&fan_out("a1", level)).await.unwrap();
        let found = concerned.iter().find(|one| one.deployment.id == "f1").unwrap();
        let instance = store.instance("f1-i002").await.unwrap().unwrap();
        assert_eq!(found.newest_state.as_deref(), Some("pending"));
        assert_eq!(found.content_digest, Some(instance.spec.content_digest()));
        assert!(concerned.iter().all(|one| one.deployment.state != DeploymentState::Deleted));
        let secrets = store.concerned_secrets(&fan_out("a1", level)).await.unwrap();
        assert!(secrets.contains(&("f1".to_owned(), "password".to_owned(), "f".to_owned())), "{secrets:?}");
    }

    let untouched = Untouched { failed: vec![("f2".into(), "why".into())], ..Untouched::default() };
    store.finish_fan_out("a1", &untouched, 11).await.unwrap();
    store.finish_fan_out("a1", &Untouched::default(), 12).await.unwrap();
    let ended =
        FanOut { state: FanOutState::Finished, untouched, ended_at: Some(11), ..fan_out("a1", FanOutLevel::Cluster) };
    assert_eq!(store.fan_out("a1").await.unwrap(), Some(ended.clone()), "it ends once");
    assert_eq!(store.fan_outs("cluster", None, 10).await.unwrap(), [ended]);
    assert_eq!(store.fan_outs("cluster", Some("a1"), 10).await.unwrap(), []);
    assert_eq!(waiting().await, before + 2);
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
            restored: vec![],
            outbox: waiting.clone(),
            instances: vec!["d-i003".into()],
            superseded: vec!["d-i001".into(), "d-i002".into()],
        },
        state,
        created_at: 9,
    };
    let lead = lead(store).await;
    store.prepare_batch(&batch("c1", BatchState::Prepared), &lead).await.unwrap();
    store.abandon_batch(&batch("c1", BatchState::Prepared), &lead).await.unwrap();
    store.prepare_batch(&batch("c2", BatchState::Prepared), &lead).await.unwrap();
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
        lead: lead.clone(),
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

fn last_report(cluster: &str, epoch: i64, sequence: i64) -> LastReport {
    LastReport {
        cluster_id: cluster.into(),
        cluster_uid: "uid".into(),
        identity: format!("agent-{epoch}"),
        epoch,
        sequence,
        reported_at: 100 + sequence,
        pods_at: Some(7),
        pods_digest: Some("sha256:p".into()),
        deployments_at: None,
        deployments_digest: None,
        flux_at: None,
        flux_digest: None,
    }
}

/// The next report of the first cluster, with nothing in it.
fn report(snapshot: Snapshot, last: i64) -> Report {
    Report {
        last: (last > 0).then_some((1, last)),
        row: last_report("cluster", 1, last + 1),
        snapshot,
        set: Vec::new(),
        remove: Vec::new(),
        deployments: Vec::new(),
        tasks: Vec::new(),
        observations: Vec::new(),
    }
}

fn status(snapshot: Snapshot, kind: &str, name: &str, deployment: Option<&str>) -> StatusRow {
    StatusRow {
        cluster_id: "cluster".into(),
        snapshot,
        kind: kind.into(),
        namespace: "n".into(),
        name: name.into(),
        deployment_id: deployment.map(str::to_owned),
        uid: String::new(),
        deleting: false,
        digest: format!("sha256:{name}"),
        content: "{}".into(),
        updated_at: 3,
    }
}

/// What agents say: whole snapshots, of which only the differences are written.
async fn statuses(store: &Shared) {
    assert_eq!(store.last_report("cluster").await.unwrap(), None);
    assert_eq!(store.last_report_of("d").await.unwrap(), None);
    let pod = |name: &str, deployment| status(Snapshot::Pods, "Pod", name, deployment);
    // More rows than one statement takes.
    let many = (0..450).map(|number| pod(&format!("p{number:03}"), (number < 3).then_some("d")));
    let first = Report { set: many.collect(), ..report(Snapshot::Pods, 0) };
    store.record_report(&first).await.unwrap();
    assert!(matches!(store.record_report(&first).await, Err(StoreError::Conflict)), "it is not the first any more");
    assert_eq!(store.last_report("cluster").await.unwrap(), Some(last_report("cluster", 1, 1)));
    assert_eq!(store.last_report_of("d").await.unwrap(), Some(last_report("cluster", 1, 1)));
    assert_eq!(store.last_report("second").await.unwrap(), None);

    let flux = |kind: &str| status(Snapshot::Flux, kind, "styrmin", None);
    let second = Report {
        set: vec![flux("GitRepository"), flux("Kustomization")],
        row: LastReport { flux_at: Some(8), flux_digest: Some("sha256:f".into()), ..last_report("cluster", 1, 2) },
        ..report(Snapshot::Flux, 1)
    };
    store.record_report(&second).await.unwrap();
    let digests = store.status_digests("cluster", Snapshot::Flux).await.unwrap();
    assert_eq!(digests.len(), 2, "kinds do not get into each other's way");
    assert_eq!(store.status_digests("cluster", Snapshot::Pods).await.unwrap().len(), 450);
    assert_eq!(store.status_digests("second", Snapshot::Pods).await.unwrap(), []);

    // One differs, one vanished; a report that is not the next one changes nothing.
    let changed =
        StatusRow { digest: "sha256:new".into(), content: "{\"a\":1}".into(), updated_at: 9, ..pod("p000", Some("d")) };
    let gone = ("Pod".to_owned(), "n".to_owned(), "p001".to_owned());
    let third = Report { set: vec![changed.clone()], remove: vec![gone], ..report(Snapshot::Pods, 2) };
    let stale = Report { last: Some((1, 1)), ..third.clone() };
    assert!(matches!(store.record_report(&stale).await, Err(StoreError::Conflict)));
    let of_d = async || store.statuses(Snapshot::Pods, StatusScope::Deployment("d"), None, 10).await.unwrap();
    assert_eq!(of_d().await, ["p000", "p001", "p002"].map(|name| pod(name, Some("d"))));
    store.record_report(&third).await.unwrap();
    assert_eq!(of_d().await, [changed.clone(), pod("p002", Some("d"))]);

    let names = |rows: Vec<StatusRow>| rows.into_iter().map(|row| row.name).collect::<Vec<_>>();
    let after = Some(["cluster", "Pod", "n", "p447"].map(str::to_owned));
    for scope in [StatusScope::All, StatusScope::Cluster("cluster")] {
        let page = store.statuses(Snapshot::Pods, scope, None, 2).await.unwrap();
        assert_eq!(names(page), ["p000", "p002"]);
        let page = store.statuses(Snapshot::Pods, scope, after.clone(), 10).await.unwrap();
        assert_eq!(names(page), ["p448", "p449"]);
    }
    let after = Some(["cluster", "Pod", "n", "p000"].map(str::to_owned));
    let page = store.statuses(Snapshot::Pods, StatusScope::Deployment("d"), after, 10).await.unwrap();
    assert_eq!(names(page), ["p002"]);
    assert_eq!(store.statuses(Snapshot::Pods, StatusScope::Cluster("second"), None, 10).await.unwrap(), []);
}

/// Tasks, instances and deployments move together with the report that says why.
async fn outcomes(store: &Shared) {
    let places = store.deployment_places("cluster").await.unwrap();
    let place = places.iter().find(|place| place.id == "d").unwrap();
    assert_eq!(places.len(), 21);
    assert_eq!((place.environment_id.as_str(), place.lifecycle), ("environment", Lifecycle::Running));
    assert_eq!((place.state, place.newest_instance_id.as_deref()), (DeploymentState::Deploying, Some("d-i003")));
    assert_eq!(store.deployment_places("second").await.unwrap(), []);

    let running = store.running_in("cluster").await.unwrap();
    assert_eq!(store.running_in("second").await.unwrap(), []);
    let found = running.iter().find(|running| running.task.id == "d-t003").unwrap();
    assert_eq!(Some(&found.task), store.task("d-t003").await.unwrap().as_ref(), "with its steps");
    assert_eq!(
        (found.shard, found.lifecycle, found.deployment_state),
        (0, Lifecycle::Running, DeploymentState::Deploying)
    );
    assert_eq!((found.revision.as_deref(), found.newest_instance_id.as_deref()), (Some("c2"), Some("d-i003")));
    assert!(running.iter().all(|running| running.task.state == TaskState::Running && running.task.steps.len() == 2));

    let outcome = |state, instance| DeploymentOutcome {
        deployment_id: "d".into(),
        newest_instance_id: Some("d-i003".into()),
        state,
        instance,
    };
    let active = |id: &str, sequence| Some(InstanceOutcome::Active { id: id.into(), sequence });
    let mut task = found.task.clone();
    // The operator's steps are others, and more.
    task.steps.push(Step { position: 2, name: "another".into(), ..task.steps[1].clone() });
    task.steps[1] =
        Step { name: "other".into(), state: StepState::Running, started_at: Some(4), ..task.steps[1].clone() };
    let good = Report {
        set: vec![status(Snapshot::Deployments, "StyrminDeployment", "styrmin-d", Some("d"))],
        deployments: vec![
            outcome(None, active("d-i002", 2)),
            outcome(Some(DeploymentState::Running), active("d-i003", 3)),
        ],
        tasks: vec![task.clone()],
        ..report(Snapshot::Deployments, 3)
    };
    // A newer instance, or a task that moved meanwhile: nothing of the report is stored.
    let mut newer = good.clone();
    newer.deployments[1].newest_instance_id = Some("d-i002".into());
    let mut moved = good.clone();
    moved.tasks[0].version = 9;
    for bad in [newer, moved] {
        assert!(matches!(store.record_report(&bad).await, Err(StoreError::Conflict)));
        assert_eq!(store.last_report("cluster").await.unwrap().unwrap().sequence, 3);
        assert_eq!(store.status_digests("cluster", Snapshot::Deployments).await.unwrap(), []);
        assert_eq!(store.instance("d-i003").await.unwrap().unwrap().state, InstanceState::Committed);
    }
    let version = store.deployment("d").await.unwrap().unwrap().version;
    assert_eq!(store.running_statuses("cluster").await.unwrap(), []);
    store.record_report(&good).await.unwrap();
    let row = store.deployment("d").await.unwrap().unwrap();
    assert_eq!((row.state, row.active_instance_id.as_deref()), (DeploymentState::Running, Some("d-i003")));
    assert_eq!(row.version, version, "what is observed is no change of what people wish");
    let state = async |id: &str| store.instance(id).await.unwrap().unwrap().state;
    assert_eq!((state("d-i002").await, state("d-i003").await), (InstanceState::Retired, InstanceState::Active));
    let stored = store.task("d-t003").await.unwrap().unwrap();
    assert_eq!(stored, Task { version: task.version + 1, ..task.clone() });

    // Once for each running task of its deployment.
    let found = store.running_statuses("cluster").await.unwrap();
    assert!(!found.is_empty() && found.iter().all(|row| *row == good.set[0]), "{found:?}");
    assert_eq!(store.running_statuses("second").await.unwrap(), []);

    // Fewer steps again.
    let fewer = Task { steps: stored.steps[..1].to_vec(), ..stored };
    let next = Report {
        deployments: vec![outcome(
            Some(DeploymentState::Failed),
            Some(InstanceOutcome::Failed { id: "d-i003".into() }),
        )],
        tasks: vec![fewer],
        ..report(Snapshot::Deployments, 4)
    };
    store.record_report(&next).await.unwrap();
    assert_eq!(store.task("d-t003").await.unwrap().unwrap().steps.len(), 1);
    assert_eq!(state("d-i003").await, InstanceState::Failed);
    assert_eq!(store.deployment("d").await.unwrap().unwrap().state, DeploymentState::Failed);

    // A change that means nothing to the cluster was computed before: it leaves the state alone.
    let mut quiet = current(change(&row));
    (quiet.deployment, quiet.instance) = (Deployment { state: DeploymentState::Pending, ..row }, None);
    store.change(&quiet).await.unwrap();
    assert_eq!(store.deployment("d").await.unwrap().unwrap().state, DeploymentState::Failed);

    let back = Report {
        deployments: vec![outcome(Some(DeploymentState::Running), active("d-i003", 3))],
        ..report(Snapshot::Deployments, 5)
    };
    store.record_report(&back).await.unwrap();
    assert_eq!(state("d-i003").await, InstanceState::Active);
    let gone = Report {
        deployments: vec![outcome(Some(DeploymentState::Deleted), Some(InstanceOutcome::Gone))],
        ..report(Snapshot::Deployments, 6)
    };
    store.record_report(&gone).await.unwrap();
    let row = store.deployment("d").await.unwrap().unwrap();
    assert_eq!((row.state, row.active_instance_id), (DeploymentState::Deleted, None));
    assert_eq!(state("d-i003").await, InstanceState::Retired);
}

/// Only what somebody asked to delete is confirmed.
async fn confirmations(store: &Shared) {
    let newest = Some("c2".to_owned());
    let none = Confirmations { newest_revision: newest.clone(), deletions: Vec::new() };
    assert_eq!(store.confirmations("cluster").await.unwrap(), none, "nothing is reported as being deleted");
    let deleting = |name: &str, id: &str| StatusRow {
        uid: format!("uid-{name}"),
        deleting: true,
        ..status(Snapshot::Deployments, "StyrminDeployment", name, Some(id))
    };
    let report = Report {
        // The first is deleted by wish, the second is not.
        set: vec![deleting("styrmin-d", "d"), deleting("styrmin-r1", "r1")],
        ..report(Snapshot::Deployments, 7)
    };
    store.record_report(&report).await.unwrap();
    let deletions = vec![("d".to_owned(), "uid-styrmin-d".to_owned())];
    assert_eq!(store.confirmations("cluster").await.unwrap(), Confirmations { newest_revision: newest, deletions });
    // The second cluster is in the same repository and branch, and has nothing to delete.
    assert_eq!(store.confirmations("second").await.unwrap(), none);
    assert_eq!(store.confirmations("nope").await.unwrap(), Confirmations::default());
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
    suite(store::open(&url).await.unwrap(), false).await;
    // Opened again, everything is there.
    assert!(store::open(&url).await.unwrap().has_administrator().await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn postgresql_conforms() {
    let postgres = Postgres::start().await;
    let url = postgres.database().await;
    suite(store::open(&url).await.unwrap(), true).await;
    assert!(store::open(&url).await.unwrap().has_administrator().await.unwrap());
}
