//! Our drivers with their charts: what the renderer makes of them, Helm takes.

use base64::Engine as _;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use styrmin_renderer::config::Object;
use styrmin_renderer::context::{self, Inputs, Named};
use styrmin_renderer::driver::Driver;
use styrmin_renderer::spec::{DriverRef, Lifecycle, StyrminDeploymentSpec};
use styrmin_renderer::{objects, yaml};
use styrmin_tests::server::drivers;
use styrmin_tests::tools::{run, tool};
use tokio::process::Command;

fn object(value: Value) -> Object {
    serde_json::from_value(value).unwrap()
}

/// The objects that Helm renders for a deployment, by kind.
async fn template(
    name: &str,
    version: &str,
    config: Value,
    parameters: Value,
    secrets: &[(&str, &str)],
) -> BTreeMap<String, Vec<Value>> {
    let folder = drivers().join(name);
    let files = styrmin_tests::server::text_files(&folder);
    let driver = Driver::from_files(files).unwrap();
    let fingerprints = secrets.iter().map(|(key, _)| ((*key).to_owned(), "f".to_owned())).collect();
    let resolution = context::resolve(&Inputs {
        cluster: Named { id: "clusterclust".parse().unwrap(), name: "prod".into() },
        environment: Named { id: "environmentx".parse().unwrap(), name: "shop".into() },
        deployment: Named { id: "k7m2q9xw4t1a".parse().unwrap(), name: "front".into() },
        driver: &driver,
        application_version: version,
        cluster_config: &object(json!({ "fqdn_suffix": "apps.example.com" })),
        environment_config: &Object::new(),
        deployment_config: &object(config),
        parameters: &object(parameters),
        secret_fingerprints: &fingerprints,
    })
    .unwrap();
    let spec = StyrminDeploymentSpec {
        deployment_id: "k7m2q9xw4t1a".parse().unwrap(),
        instance_id: "i".into(),
        lifecycle: Lifecycle::Running,
        driver: DriverRef { name: name.into(), version: driver.version.to_string(), digest: driver.digest.clone() },
        application_version: version.into(),
        context: resolution.context,
        jobs: Vec::new(),
    };
    let plain: BTreeMap<&str, &str> = secrets.iter().copied().collect();
    let values = objects::helm_values(&spec, &driver, &|reference| plain[reference.key.as_str()].to_owned()).unwrap();
    let out = tempfile::tempdir().unwrap();
    let file = out.path().join("values.yaml");
    std::fs::write(&file, yaml::to_string(&values).unwrap()).unwrap();
    let mut helm = Command::new(tool("helm"));
    helm.args(["template", "styrmin-k7m2q9xw4t1a", "--namespace", "styrmin-k7m2q9xw4t1a", "--kube-version", "1.36.0"])
        .arg(folder.join("chart"))
        .arg("--values")
        .arg(&file)
        .env("HOME", out.path());
    let rendered = run(&mut helm, b"").await;
    let read = run(Command::new(tool("yamlcheck")).arg("stream"), &rendered).await;
    let mut found: BTreeMap<String, Vec<Value>> = BTreeMap::new();
    for line in String::from_utf8(read).unwrap().split_terminator('\n') {
        let object: Value = serde_json::from_str(line).unwrap();
        if let Some(kind) = object["kind"].as_str() {
            found.entry(kind.to_owned()).or_default().push(object.clone());
        }
    }
    found
}

#[tokio::test]
async fn the_web_application_is_what_was_asked_for() {
    let config = json!({ "env_vars": { "YES": "on", "N": "0123" }, "components": { "web": { "replicas": 3, "command": ["serve"] } } });
    let parameters =
        json!({ "image": "ghcr.io/example/shop", "config": { "A": "{{ x }}" }, "files": { "a.conf": "b: \"c\"\n" } });
    let found = template("web-application", "1.20", config, parameters, &[]).await;
    let deployment = &found["Deployment"][0];
    assert_eq!(deployment["metadata"]["name"], "styrmin-k7m2q9xw4t1a");
    assert_eq!(deployment["spec"]["replicas"], 3);
    let pod = &deployment["spec"]["template"];
    assert_eq!(pod["metadata"]["labels"]["app.kubernetes.io/component"], "web");
    let container = &pod["spec"]["containers"][0];
    assert_eq!((&container["name"], &container["image"]), (&json!("web"), &json!("ghcr.io/example/shop:1.20")));
    assert_eq!(container["command"], json!(["serve"]));
    for variable in [json!({ "name": "YES", "value": "on" }), json!({ "name": "N", "value": "0123" })] {
        assert!(container["env"].as_array().unwrap().contains(&variable), "{variable}");
    }
    assert_eq!(container["securityContext"]["readOnlyRootFilesystem"], true);
    let hosts: Vec<&Value> =
        found["Ingress"][0]["spec"]["rules"].as_array().unwrap().iter().map(|rule| &rule["host"]).collect();
    assert_eq!(hosts, ["web-k7m2q9xw4t1a.apps.example.com", "web-front-shop.apps.example.com"]);
    assert!(found["Ingress"][0]["spec"]["ingressClassName"].is_null(), "the class is Styrmin's to set");
    assert!(found["ConfigMap"].iter().any(|map| map["data"]["A"] == "{{ x }}"));
    assert!(
        found["ConfigMap"].iter().any(|map| map["data"].as_object().unwrap().values().any(|text| text == "b: \"c\"\n"))
    );
    assert_eq!(found["Service"].len(), 1);
}

#[tokio::test]
async fn without_a_suffix_there_is_no_ingress() {
    let found =
        template("web-application", "1", json!({ "fqdn_suffix": null }), json!({ "image": "nginx" }), &[]).await;
    assert!(!found.contains_key("Ingress"), "{found:?}");
}

#[tokio::test]
async fn postgresql_has_its_password_storage_and_settings() {
    let config = json!({ "standard_storage": { "storage_class": "fast" } });
    let parameters = json!({ "max_connections": 50, "storage_size": "20Gi", "settings": { "work_mem": "16MB" } });
    let found = template("postgresql", "17", config, parameters, &[("password", "it's \"so\" {{ secret }}")]).await;
    let secret = &found["Secret"][0];
    let values: Vec<Vec<u8>> = secret["data"]
        .as_object()
        .unwrap()
        .values()
        .map(|text| base64::engine::general_purpose::STANDARD.decode(text.as_str().unwrap()).unwrap())
        .collect();
    assert!(values.contains(&b"it's \"so\" {{ secret }}".to_vec()), "{secret}");
    let set = &found["StatefulSet"][0];
    assert_eq!(set["spec"]["replicas"], 1);
    assert_eq!(set["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"], "database");
    assert_eq!(set["spec"]["template"]["spec"]["containers"][0]["image"], "postgres:17");
    assert!(!set.to_string().contains("it's"), "the password is in the Secret only");
    let claim = &found["PersistentVolumeClaim"][0];
    assert_eq!(claim["spec"]["storageClassName"], "fast");
    assert_eq!(claim["spec"]["resources"]["requests"]["storage"], "20Gi");
    let configuration = found["ConfigMap"][0]["data"].to_string();
    assert!(configuration.contains("max_connections = 50") && configuration.contains("work_mem"), "{configuration}");
    assert_eq!(found["Service"].len(), 2);
}
