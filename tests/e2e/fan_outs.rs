//! A configuration of a cluster or environment on its way to the deployments, as far as the server decides it.
//! (`many` has it with a cluster.)

use futures::future::join_all;
use serde_json::{Value, json};
use std::time::Duration;
use styrmin_client::{Client, FanOutProgress};
use styrmin_tests::git;
use styrmin_tests::postgres::Postgres;
use styrmin_tests::server::{Api as _, Server};

const LIMIT: Duration = Duration::from_secs(60);
/// More than two chunks.
const MANY: usize = 120;

struct Place {
    server: Server,
    client: Client,
    cluster: String,
    environment: String,
}

impl Place {
    async fn on(mut server: Server) -> Self {
        server.up().await;
        let client = server.client();
        let (cluster, _) = client.cluster(json!({ "name": "c" })).await;
        let environment = client.environment(&cluster, "e").await;
        Self { server, client, cluster, environment }
    }

    async fn start() -> Self {
        Self::on(Server::new(None)).await
    }

    /// That many deployments, in the repository.
    async fn deployments(&self, count: usize) -> Vec<String> {
        let numbers: Vec<usize> = (0..count).collect();
        let mut all = Vec::new();
        for some in numbers.chunks(20) {
            let made =
                some.iter().map(async |number| self.client.web(&self.environment, &format!("d{number}")).await.0);
            all.extend(join_all(made).await);
        }
        self.server.drained(LIMIT).await;
        all
    }

    async fn commits(&self) -> usize {
        git::commits(&self.server.hosted(&self.cluster)).await
    }

    /// Changes the configuration of the environment; gives the fan-out's id.
    async fn set(&self, config: Value) -> String {
        let query = "mutation($id: ID!, $config: ConfigPatch!) { updateEnvironment(id: $id, config: $config) { fanOut { id state } } }";
        let found = self.client.ok(query, json!({ "id": self.environment, "config": { "set": config } })).await;
        found["updateEnvironment"]["fanOut"]["id"].as_str().unwrap().to_owned()
    }

    /// The same for the cluster.
    async fn set_cluster(&self, config: Value) -> String {
        let query =
            "mutation($id: ID!, $config: ConfigPatch!) { updateCluster(id: $id, config: $config) { fanOut { id } } }";
        let found = self.client.ok(query, json!({ "id": self.cluster, "config": { "set": config } })).await;
        found["updateCluster"]["fanOut"]["id"].as_str().unwrap().to_owned()
    }

    /// Waits until every deployment was looked at, and what changed is in the repository.
    async fn finished(&self, id: &str) -> FanOutProgress {
        let found = styrmin_tests::eventually("the fan-out ends", LIMIT, async || {
            let found = self.client.fan_out(id).await.unwrap();
            if found.is_finished { Ok(found) } else { Err(found) }
        });
        let found = found.await;
        self.server.drained(LIMIT).await;
        found
    }

    /// Sequence of the newest instance and its environment variables.
    async fn newest(&self, id: &str) -> (i64, Value) {
        let query = "query($id: ID!) { deployment(id: $id) { newestInstance { sequence } values { field value } } }";
        let found = self.client.ok(query, json!({ "id": id })).await["deployment"].clone();
        let mut variables = json!({});
        for value in found["values"].as_array().unwrap() {
            if let Some(name) = value["field"].as_str().unwrap().strip_prefix("config.env_vars.") {
                variables[name] = value["value"].clone();
            }
        }
        (found["newestInstance"]["sequence"].as_i64().unwrap(), variables)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_configuration_changes_who_takes_it_once_and_in_one_commit() {
    let place = Place::start().await;
    let all = place.deployments(8).await;
    let [own, stopped, going, later, ..] = all.as_slice() else { panic!("{all:?}") };
    place.client.set_variable(own, "A", "mine").await.unwrap().unwrap();
    place.client.ask(stopped, "stopDeployment(id: $id)").await.unwrap().unwrap();
    place.client.delete(going).await.unwrap().unwrap();
    place.server.drained(LIMIT).await;
    let before = place.commits().await;

    let id = place.set(json!({ "env_vars": { "A": "environment" } })).await;
    let found = place.finished(&id).await;
    assert_eq!((found.changed, found.unchanged, found.refused.len()), (6, 1, 0), "{found:?}");
    assert_eq!(found.skipped, [(going.clone(), "it is being deleted".to_owned())]);
    assert_eq!(place.commits().await, before + 1, "one commit");
    assert_eq!(place.newest(own).await, (2, json!({ "A": "mine" })), "who sets the value is left alone");
    assert_eq!(place.newest(stopped).await, (3, json!({ "A": "environment" })));
    assert_eq!(place.newest(later).await, (2, json!({ "A": "environment" })));
    let query = "query($id: ID!) { fanOut(id: $id) { level subjectId author { name } unchangedIds changed { total running } \
        tasks(first: 100) { nodes { workflow fanOut { id } deployment { id lifecycle } instance { revision } } } } }";
    let shown = place.client.ok(query, json!({ "id": id })).await["fanOut"].clone();
    assert_eq!((&shown["level"], &shown["author"]["name"]), (&json!("ENVIRONMENT"), &json!("Ann Example")));
    assert_eq!(shown["unchangedIds"], json!([own]));
    let tasks = shown["tasks"]["nodes"].as_array().unwrap();
    assert_eq!(tasks.len(), 6);
    for task in tasks {
        assert_eq!((&task["workflow"], &task["fanOut"]["id"]), (&json!("update"), &json!(id)));
        assert_eq!(task["instance"]["revision"], tasks[0]["instance"]["revision"], "all in one commit: {shown:#}");
        assert!(task["instance"]["revision"].is_string());
    }
    let lifecycle = |id: &String| {
        let task = tasks.iter().find(|task| task["deployment"]["id"] == **id).unwrap();
        task["deployment"]["lifecycle"].clone()
    };
    assert_eq!(lifecycle(stopped), "STOPPED", "what is stopped stays so");

    // The same once more is nothing, and so is a value that everybody overrides.
    let id = place.set(json!({ "env_vars": { "A": "environment" } })).await;
    let found = place.finished(&id).await;
    assert_eq!((found.changed, found.unchanged, place.commits().await), (0, 7, before + 1), "{found:?}");
    assert_eq!(found.outcome(), None, "no agent says that they run");
    let id = place.set_cluster(json!({ "env_vars": { "A": "cluster" } })).await;
    let found = place.finished(&id).await;
    assert_eq!((found.changed, found.unchanged), (0, 7), "the environment's value counts: {found:?}");

    // A restore that runs is not disturbed. (Nothing begins one yet: the database says so.)
    let data = place.server.folder.path().join("data/styrmin.db");
    let pool = sqlx::SqlitePool::connect(&format!("sqlite:{}", data.display())).await.unwrap();
    let set = async |state: &str| {
        let query = "UPDATE deployments SET state = $2 WHERE id = $1";
        sqlx::query(query).bind(later).bind(state).execute(&pool).await.unwrap();
    };
    set("restoring").await;
    let id = place.set(json!({ "env_vars": { "A": "again" } })).await;
    let found = place.finished(&id).await;
    assert_eq!(found.skipped.iter().find(|(id, _)| id == later).unwrap().1, "a restore is running");
    assert_eq!((found.changed, place.newest(later).await.0), (5, 2), "{found:?}");
    set("deploying").await;
    let id = place.set(json!({ "env_vars": { "A": "environment" } })).await;
    assert_eq!(place.finished(&id).await.changed, 5, "what it was is what one of them still has");

    // Of a cluster it reaches every environment; the newest first in the list.
    let other = place.client.environment(&place.cluster, "other").await;
    let (far, _) = place.client.web(&other, "far").await;
    place.server.drained(LIMIT).await;
    let before = place.commits().await;
    let id = place.set_cluster(json!({ "env_vars": { "B": "cluster" } })).await;
    let found = place.finished(&id).await;
    assert_eq!((found.changed, found.unchanged, place.commits().await), (8, 0, before + 1), "{found:?}");
    assert_eq!(place.newest(&far).await.1, json!({ "A": "cluster", "B": "cluster" }));
    let query = "query($id: ID!) { cluster(id: $id) { fanOuts(first: 1) { nodes { id } pageInfo { hasNextPage } } } }";
    let listed = place.client.ok(query, json!({ "id": place.cluster })).await["cluster"]["fanOuts"].clone();
    assert_eq!((&listed["nodes"][0]["id"], &listed["pageInfo"]["hasNextPage"]), (&json!(id), &json!(true)));
}

#[tokio::test(flavor = "multi_thread")]
async fn one_that_cannot_be_changed_stops_no_other_and_is_tried_again() {
    let place = Place::start().await;
    let (short, _) = place.client.web(&place.environment, "s").await;
    let (long, _) = place.client.web(&place.environment, &"l".repeat(40)).await;
    place.server.drained(LIMIT).await;
    // With this suffix the longer name is too long for a hostname.
    let suffix = [vec!["a".repeat(60); 3].join("."), "b".repeat(40)].join(".");
    let id = place.set_cluster(json!({ "fqdn_suffix": suffix })).await;
    let found = place.finished(&id).await;
    assert_eq!((found.changed, found.refused.len()), (1, 1), "{found:?}");
    assert_eq!(found.refused[0].0, long);
    assert!(found.refused[0].1.contains("its hostname is not possible"), "{found:?}");
    assert_eq!((place.newest(&short).await.0, place.newest(&long).await.0), (2, 1));
    // A value of its own makes it possible; the same configuration once more tries it again, and only it.
    let query = "mutation($id: ID!, $input: UpdateDeploymentInput!) { updateDeployment(id: $id, input: $input) { task { id } } }";
    let input = json!({ "config": { "set": { "fqdn_suffix": "example.com" } } });
    place.client.ok(query, json!({ "id": long, "input": input })).await;
    let id = place.set_cluster(json!({ "fqdn_suffix": suffix })).await;
    let found = place.finished(&id).await;
    assert_eq!((found.changed, found.unchanged, found.refused.len()), (0, 2, 0), "{found:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_server_goes_on_with_it_and_does_nothing_twice() {
    let mut place = Place::start().await;
    let all = place.deployments(MANY).await;
    let before = place.commits().await;
    place.server.kill().await;
    place.server.set("STYRMIN_FAULT", Some(&format!("{}:2", styrmin_server::faults::FAN_OUT)));
    place.server.up().await;
    let id = place.set(json!({ "env_vars": { "A": "b" } })).await;
    place.server.ended().await;
    place.server.set("STYRMIN_FAULT", None);
    place.server.up().await;
    let found = place.finished(&id).await;
    assert_eq!((found.changed, found.unchanged, found.refused.len()), (MANY as u64, 0, 0), "{found:?}");
    assert_eq!(place.commits().await, before + 1, "what the killed one stored waited for the rest");
    for id in &all {
        assert_eq!(place.newest(id).await, (2, json!({ "A": "b" })));
    }
}

/// Many people change the deployments of a fan-out while it runs: both are in the result, in whatever order.
async fn others_change_them_meanwhile(place: &Place) {
    let all = place.deployments(MANY).await;
    let conflicts = async || place.server.metric("styrmin_change_conflicts_total").await;
    let before = conflicts().await;
    for round in 0..10 {
        let value = format!("b{round}");
        let id = place.set(json!({ "env_vars": { "A": value } })).await;
        let theirs = all.iter().rev().step_by(3).map(|id| place.client.set_variable(id, "MINE", &value));
        for done in join_all(theirs).await {
            done.unwrap();
        }
        let found = place.finished(&id).await;
        assert_eq!(found.refused, [], "{found:?}");
        for (number, id) in all.iter().rev().enumerate() {
            let (_, variables) = place.newest(id).await;
            let expected = if number % 3 == 0 { json!({ "A": value, "MINE": value }) } else { json!({ "A": value }) };
            assert_eq!(variables, expected, "{id}");
        }
        if conflicts().await > before {
            return;
        }
    }
    panic!("no change of others came in between");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_removed_or_changed_while_its_change_is_held_back_stays_so() {
    let mut server = Server::new(None);
    server.set("STYRMIN_PAUSE", Some(&format!("{}:3000", styrmin_server::faults::FAN_OUT)));
    let place = Place::on(server).await;
    place.deployments(60).await;
    let id = place.set(json!({ "env_vars": { "A": "b" } })).await;
    let query = "query($id: ID!) { fanOut(id: $id) { state tasks(first: 2) { nodes { id deployment { id } } } } }";
    let look = async || place.client.ok(query, json!({ "id": id })).await["fanOut"].clone();
    let tasks = styrmin_tests::eventually("a chunk is stored", LIMIT, async || {
        let tasks = look().await["tasks"]["nodes"].clone();
        if tasks.as_array().unwrap().len() == 2 { Ok(tasks) } else { Err(tasks) }
    });
    let tasks = tasks.await;
    let of = |number: usize, field: &str| tasks[number].pointer(field).unwrap().as_str().unwrap().to_owned();
    let (gone, changed) = (of(0, "/deployment/id"), of(1, "/deployment/id"));
    place.client.delete(&gone).await.unwrap().unwrap();
    place.client.set_variable(&changed, "MINE", "x").await.unwrap().unwrap();
    // Both are in the repository before the fan-out has ended.
    let repository = place.server.hosted(&place.cluster);
    let has = async |id: &str, word: &str| {
        let files = git::files(&repository).await;
        files
            .iter()
            .any(|(path, text)| path.contains(id) && path.ends_with("styrmindeployment.yaml") && text.contains(word))
    };
    styrmin_tests::eventually("both are pushed", LIMIT, async || {
        let found = (has(&gone, "").await, has(&changed, "MINE: x").await);
        if found == (false, true) { Ok(()) } else { Err(found) }
    })
    .await;
    assert_eq!(look().await["state"], "RUNNING");
    place.finished(&id).await;
    // A round of the writer more.
    place.client.web(&place.environment, "more").await;
    place.server.drained(LIMIT).await;
    assert!(!has(&gone, "").await, "it was removed");
    assert!(has(&changed, "MINE: x").await, "the newer change is what the repository has");
    for number in [0, 1] {
        let task = place.client.task(&of(number, "/id")).await.unwrap();
        assert_eq!(task.state, "SUPERSEDED", "{task:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn changes_of_others_meanwhile_count_too() {
    others_change_them_meanwhile(&Place::start().await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn changes_of_others_meanwhile_count_too_on_postgresql() {
    let postgres = Postgres::start().await;
    let place = Place::on(Server::new(Some(postgres.database().await))).await;
    others_change_them_meanwhile(&place).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_to_do_costs_as_many_statements_for_many_as_for_few() {
    let mut server = Server::new(None);
    server.set("STYRMIN_LOG", Some("warn,sqlx=debug"));
    let place = Place::on(server).await;
    let mut counts = Vec::new();
    for more in [4, 60] {
        let (cluster, _) = place.client.cluster(json!({ "name": format!("c{more}"), "config": {} })).await;
        let environment = place.client.environment(&cluster, "e").await;
        let place = Place { server: Server::new(None), client: place.client.clone(), cluster, environment };
        for number in 0..more {
            place.client.web(&place.environment, &format!("d{number}")).await;
        }
        counts.push(place);
    }
    place.server.drained(LIMIT).await;
    let statements = || place.server.log().lines().filter(|line| line.contains("sqlx::query")).count();
    let mut seen = Vec::new();
    for one in &counts {
        let mut least = usize::MAX;
        // The writers look every now and then, and their statements are counted, too.
        for _ in 0..3 {
            let before = statements();
            let id = one.set_cluster(json!({})).await;
            // Looked at once it is over, so that looking costs the same for both.
            tokio::time::sleep(Duration::from_secs(2)).await;
            let found = place.client.fan_out(&id).await.unwrap();
            assert!(found.is_finished && found.changed == 0, "{found:?}");
            least = least.min(statements() - before);
        }
        seen.push(least);
    }
    assert!(seen[0] > 5, "statements are counted: {seen:?}");
    assert!(seen[1] <= seen[0] + 2, "{seen:?}");
}
