//! Benchmarks: ours and a peer's in the same run, equal results proved, ratios as JSON lines.
//!
//! `./scripts/bench commit`, `render`, `loop`, `operator`, `fanout` and `reports`; what each measures stands at its function.

mod fan_out;
mod operator;
mod reports;

use clap::{Parser, Subcommand};
use futures::future::join_all;
use git2::{Oid, Repository};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use styrmin_renderer::config::Object;
use styrmin_renderer::context::{self, Inputs, Named};
use styrmin_renderer::driver::Driver;
use styrmin_renderer::spec::{self, DriverRef, Lifecycle, StyrminDeploymentSpec};
use styrmin_renderer::{layout, names, yaml};
use styrmin_server::repository::{Edit, Edits, Signature, Stamp, commit, splice};
use styrmin_tests::eventually;
use styrmin_tests::git::{self, Person};
use styrmin_tests::plane::is_ready;
use styrmin_tests::server::{Api as _, Server};
use styrmin_tests::tools::{run, tool};
use styrmin_tests::world::World;
use tokio::process::Command;

/// How long a part may take on a busy machine.
const BENCH_LIMIT: Duration = Duration::from_secs(600);

#[derive(Debug, Parser)]
struct Cli {
    #[command(subcommand)]
    bench: Bench,
}

#[derive(Debug, Subcommand)]
enum Bench {
    /// Commits: one file in large repositories, many callers, many files.
    Commit {
        /// Only this part: a, b or c.
        part: Option<String>,
    },
    /// Rendering StyrminDeployments.
    Render,
    /// From mutations to ready pods.
    Loop,
    /// A configuration for all deployments of an environment.
    Fanout {
        /// How many deployments.
        #[arg(default_value_t = 10_000)]
        count: usize,
    },
    /// Agents that report.
    Reports {
        /// How many.
        #[arg(default_value_t = 1000)]
        agents: usize,
    },
    /// The operator with many deployments.
    Operator {
        /// How many; 1,000 and 10,000 when absent.
        count: Option<usize>,
    },
}

#[tokio::main]
async fn main() {
    match Cli::parse().bench {
        Bench::Commit { part } => {
            let wanted = |name: &str| part.as_deref().is_none_or(|part| part == name);
            if wanted("a") {
                one_file().await;
            }
            if wanted("b") {
                many_callers().await;
            }
            if wanted("c") {
                many_files().await;
            }
        }
        Bench::Render => render().await,
        Bench::Loop => whole_loop().await,
        Bench::Fanout { count } => fan_out::fan_out(count).await,
        Bench::Reports { agents } => reports::reports(agents).await,
        Bench::Operator { count } => {
            operator::operator(&count.map_or_else(|| vec![1000, 10_000], |count| vec![count])).await;
        }
    }
}

fn report(bench: &str, figures: Value) {
    let mut line = json!({ "bench": bench });
    line.as_object_mut().unwrap().extend(figures.as_object().unwrap().clone());
    println!("{line}");
}

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort();
    times[times.len() / 2].as_secs_f64() * 1000.0
}

fn round(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

fn id(number: usize) -> String {
    format!("d{number:011}")
}

/// A file of a deployment as large as a real one.
fn content(number: usize, round: usize) -> String {
    let mut text = format!(
        "apiVersion: styrmin.io/v1alpha1\nkind: StyrminDeployment\nmetadata:\n  name: styrmin-{}\n  annotations: {{styrmin.io/instance-sequence: \"{round}\"}}\nspec:\n",
        id(number)
    );
    for line in 0..70 {
        let _ = writeln!(text, "  field{line}: value {} of {number}", line * 7);
    }
    text
}

fn path(number: usize) -> String {
    let environment = names::id_from_random([1; 12]).parse().unwrap();
    let shard = u32::try_from(number).unwrap() / layout::SHARD_SIZE;
    let folder = layout::deployment_folder(&environment, shard, &id(number).parse().unwrap());
    format!("{folder}/{}", layout::DEPLOYMENT_FILE)
}

/// A bare repository with `count` deployments in one pack.
async fn repository(folder: &Path, count: usize) -> PathBuf {
    let path = folder.join(format!("base-{count}.git"));
    let repository = Repository::init_bare(&path).unwrap();
    let edits: Edits = (0..count).map(|number| (self::path(number), Edit::Write(content(number, 0)))).collect();
    let tree = splice(&repository, None, &edits).unwrap();
    move_main(&repository, commit(&repository, tree, None, &stamp("base", &us(), 1)).unwrap());
    path
}

fn us() -> Signature {
    Signature { name: "Styrmin".into(), email: "styrmin@example.com".into() }
}

fn stamp<'a>(message: &'a str, us: &'a Signature, seconds: i64) -> Stamp<'a> {
    Stamp { message, author: us, committer: us, seconds, signer: None }
}

fn move_main(repository: &Repository, id: Oid) {
    repository.reference("refs/heads/main", id, true, "bench").unwrap();
}

async fn copy(base: &Path, name: &str) -> PathBuf {
    let path = base.with_file_name(format!("{}-{name}", base.file_name().unwrap().to_string_lossy()));
    let mut command = Command::new("cp");
    run(command.args(["-r", "--reflink=auto"]).arg(base).arg(&path), b"").await;
    path
}

fn main_tree(path: &Path) -> Oid {
    Repository::open_bare(path).unwrap().find_reference("refs/heads/main").unwrap().peel_to_tree().unwrap().id()
}

/// One commit of ours: open, splice, commit, move the branch.
fn ours(path: &Path, edits: &Edits, seconds: i64) {
    let repository = Repository::open_bare(path).unwrap();
    let tip = repository.refname_to_id("refs/heads/main").unwrap();
    let base = repository.find_commit(tip).unwrap().tree().unwrap();
    let tree = splice(&repository, Some(&base), edits).unwrap();
    move_main(&repository, commit(&repository, tree, Some(tip), &stamp("change", &us(), seconds)).unwrap());
}

/// The same by `git fast-import`.
async fn fast_import(path: &Path, edits: &Edits, seconds: i64) {
    let mut stream = format!(
        "commit refs/heads/main\ncommitter Styrmin <styrmin@example.com> {seconds} +0000\ndata 6\nchange\nfrom refs/heads/main^0\n"
    );
    for (path, edit) in edits {
        let Edit::Write(text) = edit else { unreachable!() };
        let _ = write!(stream, "M 100644 inline {path}\ndata {}\n{text}\n", text.len());
    }
    run(&mut git::command(path, &["fast-import", "--quiet"]), stream.as_bytes()).await;
}

/// (a) Changes one file in a repository of 1,000, 10,000 and 100,000 deployments: ours, `git
/// fast-import`, and `git add` and `git commit` in a work tree. All three must end with one tree.
async fn one_file() {
    const ROUNDS: usize = 25;
    let mut growth = Vec::new();
    for count in [1_000, 10_000, 100_000] {
        let folder = tempfile::tempdir().unwrap();
        let base = repository(folder.path(), count).await;
        let (mine, peer) = (copy(&base, "ours").await, copy(&base, "peer").await);
        let work = folder.path().join("work");
        git::git(folder.path(), &["clone", "--quiet", "-b", "main", base.to_str().unwrap(), work.to_str().unwrap()])
            .await;
        let (mut our_times, mut peer_times, mut work_times) = (Vec::new(), Vec::new(), Vec::new());
        for round in 1..=ROUNDS {
            let number = (round * 7919) % count;
            let edits = Edits::from([(path(number), Edit::Write(content(number, round)))]);
            let seconds = i64::try_from(round).unwrap() + 1;
            let start = Instant::now();
            ours(&mine, &edits, seconds);
            our_times.push(start.elapsed());
            let start = Instant::now();
            fast_import(&peer, &edits, seconds).await;
            peer_times.push(start.elapsed());
            let start = Instant::now();
            std::fs::write(work.join(path(number)), content(number, round)).unwrap();
            git::git(&work, &["add", &path(number)]).await;
            git::git(&work, &["commit", "--quiet", "-m", "change"]).await;
            work_times.push(start.elapsed());
        }
        assert_eq!(main_tree(&mine), main_tree(&peer), "equal results");
        assert_eq!(main_tree(&mine), main_tree(&work.join(".git")), "equal results");
        let (our, import, tree) = (median(our_times), median(peer_times), median(work_times));
        growth.push(our);
        report(
            "commit.one_file",
            json!({ "deployments": count, "ours_ms": round(our), "fast_import_ms": round(import), "work_tree_ms": round(tree),
                "ours_to_fast_import": round(our / import), "goal": 1.5, "work_tree_to_ours": round(tree / our) }),
        );
    }
    report("commit.growth", json!({ "from": 1000, "to": 100_000, "ratio": round(growth[2] / growth[0]), "goal": 1.5 }));
}

/// (b) 64 callers × 100 changes through the API while somebody else pushes five times a second,
/// against 64 people who each commit and `git pull --rebase && git push` until it lands.
async fn many_callers() {
    const CALLERS: usize = 64;
    const CHANGES: usize = 100;
    const PEER_SECONDS: u64 = 30;
    let server = Server::start().await;
    let repository = git::bare(server.folder.path()).await;
    let client = server.client();
    let (cluster, _) = client.cluster(json!({ "name": "c", "git": { "url": repository } })).await;
    let environment = client.environment(&cluster, "e").await;
    let mut deployments = Vec::new();
    for number in 0..CALLERS {
        deployments.push(client.web(&environment, &format!("d{number}")).await.0);
    }
    server.drained(Duration::from_secs(60)).await;
    let before = git::commits(&repository).await;
    let person = Person::start(server.folder.path(), &repository, Duration::from_millis(200)).await;
    let start = Instant::now();
    let callers = deployments.iter().map(|deployment| {
        let (client, deployment) = (client.clone(), deployment.clone());
        tokio::spawn(async move {
            for change in 0..CHANGES {
                client.set_variable(&deployment, &format!("V{change}"), "x").await.unwrap();
            }
        })
    });
    join_all(callers).await.into_iter().for_each(|done| done.unwrap());
    let answered = start.elapsed();
    server.drained(Duration::from_secs(120)).await;
    let taken = start.elapsed();
    let pushed = person.finish().await;
    let files = git::files(&repository).await;
    for deployment in &deployments {
        let (_, text) =
            files.iter().find(|(path, _)| path.ends_with(&format!("{deployment}/styrmindeployment.yaml"))).unwrap();
        let value: Value = yaml::from_str(text).unwrap();
        assert_eq!(
            value["spec"]["context"]["instance"]["config"]["env_vars"].as_object().map(Map::len),
            Some(CHANGES),
            "all land"
        );
    }
    let commits = git::commits(&repository).await - before - pushed;
    let rate = (CALLERS * CHANGES) as f64 / taken.as_secs_f64();

    // The peer, on a repository with the same files.
    let folder = tempfile::tempdir().unwrap();
    let peer = folder.path().join("peer.git");
    run(Command::new("cp").arg("-r").arg(&repository).arg(&peer), b"").await;
    let mut works = Vec::new();
    for number in 0..CALLERS {
        let work = folder.path().join(format!("work-{number}"));
        git::git(folder.path(), &["clone", "--quiet", "-b", "main", peer.to_str().unwrap(), work.to_str().unwrap()])
            .await;
        works.push(work);
    }
    let person = Person::start(folder.path(), &peer, Duration::from_millis(200)).await;
    let end = Instant::now() + Duration::from_secs(PEER_SECONDS);
    let start = Instant::now();
    let people = works.into_iter().enumerate().map(|(number, work)| {
        tokio::spawn(async move {
            let mut landed = 0;
            while Instant::now() < end {
                std::fs::write(work.join(format!("file-{number}")), format!("{landed}\n")).unwrap();
                git::git(&work, &["add", "-A"]).await;
                git::git(&work, &["commit", "--quiet", "-m", "change"]).await;
                while Instant::now() < end {
                    if git::succeeds(&work, &["pull", "--quiet", "--rebase", "origin", "main"]).await
                        && git::succeeds(&work, &["push", "--quiet", "origin", "HEAD:main"]).await
                    {
                        landed += 1;
                        break;
                    }
                }
            }
            landed
        })
    });
    let landed: usize = join_all(people).await.into_iter().map(|done| done.unwrap()).sum();
    let peer_rate = landed as f64 / start.elapsed().as_secs_f64();
    person.finish().await;
    report(
        "commit.many_callers",
        json!({ "callers": CALLERS, "changes": CALLERS * CHANGES, "seconds": round(taken.as_secs_f64()), "answered_seconds": round(answered.as_secs_f64()),
            "commits": commits, "foreign_pushes": pushed, "ours_per_second": round(rate), "peer_landed": landed,
            "peer_per_second": round(peer_rate), "ratio": round(rate / peer_rate), "goal": 20 }),
    );
}

/// (c) 10,000 changed deployments in one commit: ours and `git fast-import`.
async fn many_files() {
    const COUNT: usize = 10_000;
    const ROUNDS: usize = 7;
    let folder = tempfile::tempdir().unwrap();
    let base = repository(folder.path(), COUNT).await;
    let (mut our_times, mut peer_times) = (Vec::new(), Vec::new());
    for round in 1..=ROUNDS {
        let (mine, peer) = (copy(&base, &format!("ours{round}")).await, copy(&base, &format!("peer{round}")).await);
        let edits: Edits = (0..COUNT).map(|number| (path(number), Edit::Write(content(number, round)))).collect();
        let start = Instant::now();
        ours(&mine, &edits, 2);
        our_times.push(start.elapsed());
        let start = Instant::now();
        fast_import(&peer, &edits, 2).await;
        peer_times.push(start.elapsed());
        assert_eq!(main_tree(&mine), main_tree(&peer), "equal results");
        git::git(&mine, &["fsck", "--full"]).await;
    }
    let (our, import) = (median(our_times), median(peer_times));
    report(
        "commit.many_files",
        json!({ "files": COUNT, "commits": 1, "ours_ms": round(our), "fast_import_ms": round(import), "ratio": round(our / import), "goal": 1.2 }),
    );
}

/// 10,000 instances from inputs to files' bytes, against `kubectl kustomize` reading the same files
/// and writing them out again.
async fn render() {
    const COUNT: usize = 10_000;
    let folder = styrmin_tests::server::drivers().join("web-application");
    let files = styrmin_tests::server::text_files(&folder);
    let driver = Driver::from_files(files).unwrap();
    let environment: names::EnvironmentId = "environmentx".parse().unwrap();
    let start = Instant::now();
    let texts: Vec<String> = (0..COUNT).map(|number| one_instance(&driver, &environment, number)).collect();
    let ours = COUNT as f64 / start.elapsed().as_secs_f64();

    let out = tempfile::tempdir().unwrap();
    let mut resources = Vec::new();
    for (number, text) in texts.iter().enumerate() {
        let name = format!("{}.yaml", id(number));
        std::fs::write(out.path().join(&name), text).unwrap();
        resources.push(name);
    }
    let kustomization =
        json!({ "apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": resources });
    std::fs::write(out.path().join("kustomization.yaml"), yaml::to_string(&kustomization).unwrap()).unwrap();
    let start = Instant::now();
    let built = run(Command::new(tool("kubectl")).arg("kustomize").arg(out.path()), b"").await;
    let peer = COUNT as f64 / start.elapsed().as_secs_f64();
    let read = String::from_utf8(run(Command::new(tool("yamlcheck")).arg("stream"), &built).await).unwrap();
    let found: BTreeMap<String, Value> = read
        .split_terminator('\n')
        .map(|line| serde_json::from_str::<Value>(line).unwrap())
        .map(|object| (object["metadata"]["name"].as_str().unwrap().to_owned(), object))
        .collect();
    assert_eq!(found.len(), COUNT);
    for (number, text) in texts.iter().enumerate() {
        assert_eq!(found[&format!("styrmin-{}", id(number))], yaml::from_str::<Value>(text).unwrap(), "equal results");
    }
    report(
        "render",
        json!({ "instances": COUNT, "ours_per_second": ours.round(), "kustomize_per_second": round(peer), "ratio": round(ours / peer), "goal": 100 }),
    );
}

/// 50 deployments created at once through the API until all of them are RUNNING, against Flux alone
/// with the same 50 HelmReleases, whose namespaces, values and chart are there.
async fn whole_loop() {
    const COUNT: usize = 50;
    let world = World::start().await;
    let client = world.client();
    // The chart is in the cluster for both.
    let (warm, task) = client.web(&world.environment, "warm").await;
    world.until_ended(&task).await;
    let states = async || {
        let query = "query($id: ID!) { deployments(environment: $id, first: 100) { nodes { state } } }";
        let data = client.ok(query, json!({ "id": world.environment })).await;
        data["deployments"]["nodes"].as_array().unwrap().clone()
    };
    let before = operator::calls(&operator::scrape(&world.metrics).await);
    let start = Instant::now();
    #[expect(clippy::disallowed_methods, reason = "compared with what the server's clock says of steps")]
    let since = jiff::Timestamp::now();
    let created = join_all((0..COUNT).map(|number| {
        let (client, environment) = (client.clone(), world.environment.clone());
        async move { client.web(&environment, &format!("d{number}")).await.0 }
    }))
    .await;
    let answered = start.elapsed();
    eventually("all run", BENCH_LIMIT, async || {
        let running = states().await.iter().filter(|one| one["state"] == "RUNNING").count();
        tokio::time::sleep(Duration::from_millis(200)).await;
        if running == COUNT + 1 { Ok(()) } else { Err(running) }
    })
    .await;
    let ours = start.elapsed();
    let calls = operator::since(&before, &operator::calls(&operator::scrape(&world.metrics).await));
    let reached = reached(&client, &world.environment, since).await;
    let images =
        "jsonpath={range .items[*]}{.metadata.namespace} {.spec.containers[*].image} {.status.phase}{\"\\n\"}{end}";
    let result = async || {
        let text = world.plane.kubectl(&["get", "pods", "-A", "-o", images]).await;
        let mut lines: Vec<String> = text.lines().map(str::to_owned).filter(|line| !line.contains(&warm)).collect();
        lines.sort();
        lines
    };
    let our_result = result().await;

    // What Flux gets of it, to be given to it once more by hand.
    let namespace = format!("styrmin-env-{}", world.environment);
    let list = async |what: &str| -> Vec<Value> {
        let text = world.plane.kubectl(&["-n", &namespace, "get", what, "-o", "json"]).await;
        serde_json::from_str::<Value>(&text).unwrap()["items"].as_array().unwrap().clone()
    };
    let plain = |object: &Value| {
        let mut object = object.clone();
        object["metadata"] = json!({ "namespace": namespace, "name": object["metadata"]["name"] });
        object.as_object_mut().unwrap().remove("status");
        object
    };
    let of_bench = |object: &&Value| created.iter().any(|id| object["metadata"]["name"].as_str().unwrap().contains(id));
    let releases: Vec<Value> = list("helmreleases").await.iter().filter(of_bench).map(plain).collect();
    let values: Vec<Value> = list("secrets").await.iter().filter(of_bench).map(plain).collect();
    assert_eq!(releases.len(), COUNT);
    for id in &created {
        client.delete(id).await.unwrap();
    }
    eventually("all are gone", BENCH_LIMIT, async || {
        let deleted = states().await.iter().filter(|one| one["state"] == "DELETED").count();
        if deleted == COUNT { Ok(()) } else { Err(deleted) }
    })
    .await;
    for id in &created {
        world.plane.namespace(&format!("styrmin-{id}")).await;
    }
    for secret in &values {
        world.plane.apply(secret).await;
    }
    let start = Instant::now();
    join_all(releases.iter().map(|release| world.plane.apply(release))).await;
    eventually("Flux alone is done", BENCH_LIMIT, async || {
        let found = list("helmreleases").await;
        let ready = found.iter().filter(of_bench).filter(|release| is_ready(Some(release))).count();
        tokio::time::sleep(Duration::from_millis(200)).await;
        if ready == COUNT { Ok(()) } else { Err(ready) }
    })
    .await;
    let peer = start.elapsed();
    assert_eq!(result().await, our_result, "equal results");
    report(
        "loop",
        json!({ "deployments": COUNT, "answered_seconds": round(answered.as_secs_f64()), "steps_ended_seconds": reached,
            "agent_calls": calls, "ours_seconds": round(ours.as_secs_f64()),
            "flux_alone_seconds": round(peer.as_secs_f64()), "ratio": round(ours.as_secs_f64() / peer.as_secs_f64()), "goal": 1.3 }),
    );
}

/// When the last deployment of an environment came past each step, in seconds after a moment.
async fn reached(client: &styrmin_client::Client, environment: &str, since: jiff::Timestamp) -> BTreeMap<String, f64> {
    let query = "query($id: ID!) { deployments(environment: $id, first: 100) { nodes { \
        tasks { nodes { steps { name endedAt } } } } } }";
    let data = client.ok(query, json!({ "id": environment })).await;
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let mut reached: BTreeMap<String, f64> = BTreeMap::new();
    for deployment in list(&data["deployments"]["nodes"]) {
        for step in list(&deployment["tasks"]["nodes"]).iter().flat_map(|task| list(&task["steps"])) {
            let Some(ended) = step["endedAt"].as_str().and_then(|at| at.parse::<jiff::Timestamp>().ok()) else {
                continue;
            };
            let seconds = round(ended.duration_since(since).as_secs_f64());
            let last = reached.entry(step["name"].as_str().unwrap().to_owned()).or_insert(seconds);
            *last = last.max(seconds);
        }
    }
    reached
}

fn one_instance(driver: &Driver, environment: &names::EnvironmentId, number: usize) -> String {
    let object = |value: Value| serde_json::from_value::<Object>(value).unwrap();
    let deployment: names::DeploymentId = id(number).parse().unwrap();
    let resolution = context::resolve(&Inputs {
        cluster: Named { id: "clusterclust".parse().unwrap(), name: "prod".into() },
        environment: Named { id: environment.clone(), name: "shop".into() },
        deployment: Named { id: deployment.clone(), name: format!("front-{number}") },
        driver,
        application_version: "1.27",
        cluster_config: &object(json!({ "fqdn_suffix": "apps.example.com" })),
        environment_config: &object(json!({ "env_vars": { "STAGE": "prod" } })),
        deployment_config: &object(json!({ "env_vars": { "NUMBER": number.to_string() } })),
        parameters: &object(json!({ "image": "nginx" })),
        secret_fingerprints: &BTreeMap::new(),
    })
    .unwrap();
    let spec = StyrminDeploymentSpec {
        deployment_id: deployment,
        instance_id: format!("instance-{number}"),
        lifecycle: Lifecycle::Running,
        driver: DriverRef {
            name: driver.name().into(),
            version: driver.version.to_string(),
            digest: driver.digest.clone(),
        },
        application_version: "1.27".into(),
        context: resolution.context,
        jobs: Vec::new(),
    };
    yaml::to_string(&spec::object(&spec, environment, 1)).unwrap()
}
