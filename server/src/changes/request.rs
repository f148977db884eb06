//! What people can ask of a deployment, and what each wish changes of its rows. No I/O.

use super::compute::{Edit, Rows, new_run};
use super::{ChangeError, Result, invalid};
use crate::drivers::{Catalog, SelectError};
use crate::store::{Instance, Lifecycle, Task, TaskState};
use serde_json::{Value, json};
use std::sync::Arc;
use styrmin_renderer::config::{Object, Patch};
use styrmin_renderer::driver::format::Hook;

/// Most requested runs of jobs that have not been applied yet.
const JOBS_MAX: usize = 50;

/// A change of a deployment's configuration.
#[derive(Debug, Clone, Default)]
pub struct UpdateDeployment {
    /// Changes of the configuration.
    pub config: Patch,
    /// Parameters to set, the secret ones included.
    pub parameters: Object,
    /// Parameters to give back to the driver's default.
    pub remove_parameters: Vec<String>,
    /// Version of the application; `None`: the one it has, with the driver version that it has.
    pub application_version: Option<String>,
    /// Driver version to insist on from now on; `Some(None)`: on none any more. `None`: as it is, but another
    /// version of the application chooses again.
    pub driver_version: Option<Option<String>>,
}

/// What somebody asks of a deployment.
#[derive(Debug, Clone)]
pub enum Request {
    /// Another configuration, other parameters.
    Update(UpdateDeployment),
    /// Another version of its application, choosing the driver version again; with neither version named it
    /// takes the newest driver for the version it has.
    Upgrade {
        /// Version of the application; `None`: the one it has.
        application_version: Option<String>,
        /// Driver version to insist on.
        driver_version: Option<String>,
    },
    /// Another number of pods of a component.
    Scale {
        /// Name of the component.
        component: String,
        /// Number of pods.
        replicas: u32,
    },
    /// Components without pods. How many they have is not forgotten.
    StopComponents(Vec<String>),
    /// Components with their pods again.
    StartComponents(Vec<String>),
    /// No pods at all.
    Stop,
    /// Runs again.
    Start,
    /// One run of a driver's job.
    RunJob {
        /// Name of the action.
        action: String,
    },
    /// Once more what its newest task failed to do.
    Retry {
        /// The task.
        task: String,
    },
    /// The content of an earlier instance, configuration and secrets included.
    Rollback {
        /// The instance.
        instance: String,
    },
    /// Its end.
    Delete,
}

/// What has to be read for a request besides the deployment's own rows.
#[derive(Debug, Clone, Default)]
pub(super) struct Named {
    /// The task that is tried again.
    pub(super) task: Option<Task>,
    /// The instance that is gone back to.
    pub(super) instance: Option<Instance>,
}

impl Request {
    /// What it changes.
    pub(super) fn edit(&self, rows: &Rows, named: &Named, catalog: &Catalog) -> Result<Edit> {
        let row = &rows.deployment;
        let object = || format!("deployment \"{}\"", row.name);
        // The same settings for each of some components; `starts` takes back that they are stopped.
        let components = |names: &[String], settings: Option<Value>, starts: bool| {
            if names.is_empty() {
                return Err(invalid(object(), "components", "none is named; name one or more"));
            }
            let known = &rows.driver()?.file.spec.components;
            if let Some(name) = names.iter().find(|name| !known.contains_key(*name)) {
                let known: Vec<&str> = known.keys().map(String::as_str).collect();
                let message = format!("there is no component \"{name}\"; it has {}", known.join(", "));
                return Err(invalid(object(), "components", message));
            }
            let mut config = Patch::default();
            if let Some(settings) = settings {
                let each: Object = names.iter().map(|name| (name.clone(), settings.clone())).collect();
                config.set.insert("components".to_owned(), each.into());
            }
            if starts {
                config.remove = names.iter().map(|name| format!("/components/{name}/stopped")).collect();
            }
            Ok(Edit { config, ..Edit::default() })
        };
        let select = |version: Option<&String>, pin: Option<&String>| {
            let wanted = version.unwrap_or(&row.application_version);
            let found = catalog.select(&row.driver_name, Some(wanted), pin.map(String::as_str));
            let (driver, version) =
                found.map_err(|SelectError { field, message }| invalid(object(), field, message))?;
            Ok::<_, ChangeError>((driver, version, pin.cloned()))
        };
        match self {
            Self::Update(input) => {
                let version = input.application_version.as_ref().filter(|wanted| **wanted != row.application_version);
                let pins = input.driver_version.as_ref().is_some_and(|pin| *pin != row.driver_pin);
                let pin = input.driver_version.as_ref().and_then(Option::as_ref);
                let driver = (version.is_some() || pins).then(|| select(version, pin)).transpose()?;
                Ok(Edit {
                    config: input.config.clone(),
                    parameters: input.parameters.clone(),
                    remove_parameters: input.remove_parameters.clone(),
                    driver,
                    ..Edit::default()
                })
            }
            Self::Upgrade { application_version, driver_version } => {
                let driver = select(application_version.as_ref(), driver_version.as_ref())?;
                Ok(Edit { driver: Some(driver), ..Edit::default() })
            }
            // Who scales something wants its pods.
            Self::Scale { component, replicas } => {
                components(std::slice::from_ref(component), Some(json!({ "replicas": replicas })), true)
            }
            Self::StopComponents(names) => components(names, Some(json!({ "stopped": true })), false),
            Self::StartComponents(names) => components(names, None, true),
            Self::Stop => Ok(Edit { lifecycle: Some(Lifecycle::Stopped), ..Edit::default() }),
            Self::Start => Ok(Edit { lifecycle: Some(Lifecycle::Running), ..Edit::default() }),
            Self::RunJob { action } => {
                let driver = rows.driver()?;
                let jobs = || driver.file.spec.actions.iter().filter(|action| action.hook == Hook::Job);
                if !jobs().any(|job| job.name == *action) {
                    let known: Vec<&str> = jobs().map(|job| job.name.as_str()).collect();
                    let known = if known.is_empty() { "no jobs".to_owned() } else { known.join(", ") };
                    let message = format!("driver {} has no job \"{action}\"; it has {known}", driver.name());
                    return Err(invalid(object(), "action", message));
                }
                let waiting = rows.open_runs().count();
                if waiting >= JOBS_MAX {
                    let message = format!("{waiting} runs wait already; try again when some have ended");
                    return Err(invalid(object(), "action", message));
                }
                Ok(Edit { jobs: vec![new_run(action)], ..Edit::default() })
            }
            Self::Retry { task: id } => {
                let place = format!("task \"{id}\"");
                let task = named.task.as_ref().filter(|task| task.deployment_id == row.id);
                let task = task.ok_or_else(|| ChangeError::NotFound { kind: "task", id: id.clone() })?;
                if row.newest_instance_id.as_ref() != Some(&task.instance_id) {
                    let message = "a newer change of the deployment took its place; try that one's task again, or make \
                                   another change";
                    return Err(invalid(place, "state", message));
                }
                if task.state != TaskState::Failed {
                    let message = format!("is {}; only a failed task can be tried again", task.state.as_str());
                    return Err(invalid(place, "state", message));
                }
                Ok(Edit { again: true, ..Edit::default() })
            }
            Self::Rollback { instance: id } => {
                let found = named.instance.as_ref().filter(|found| found.deployment_id == row.id);
                let found = found.ok_or_else(|| ChangeError::NotFound { kind: "instance", id: id.clone() })?;
                let digest = &found.spec.driver.digest;
                let driver = catalog.by_digest.get(digest).cloned().ok_or_else(|| {
                    let message = format!(
                        "its driver {digest} cannot be used by this release; go back to another instance, or upgrade the \
                         deployment"
                    );
                    invalid(format!("instance \"{id}\""), "driver", message)
                })?;
                if found.document.is_none() || found.sources.is_none() {
                    let message = "is the end of a deployment, or of a release that did not keep what it was made from; \
                                   go back to another instance";
                    return Err(invalid(format!("instance \"{id}\""), "content", message));
                }
                Ok(Edit { restore: Some((Box::new(found.clone()), driver)), ..Edit::default() })
            }
            Self::Delete => Ok(Edit { delete: true, ..Edit::default() }),
        }
    }

    /// The instance that it names, if any.
    pub(super) fn instance(&self) -> Option<&str> {
        match self {
            Self::Rollback { instance } => Some(instance),
            _ => None,
        }
    }

    /// The task that it names, if any.
    pub(super) fn task(&self) -> Option<&str> {
        match self {
            Self::Retry { task } => Some(task),
            _ => None,
        }
    }
}

/// A change that somebody thinks of.
#[derive(Debug, Clone)]
pub enum Wish {
    /// A new deployment.
    Create(CreateDeployment),
    /// A change of one.
    Change {
        /// The deployment.
        deployment: String,
        /// What is asked of it.
        request: Request,
    },
}

/// What a new deployment is made from.
#[derive(Debug, Clone)]
pub struct CreateDeployment {
    /// Its environment.
    pub environment: String,
    /// Unique name in it.
    pub name: String,
    /// Name of the driver.
    pub driver: String,
    /// Driver version to insist on.
    pub driver_version: Option<String>,
    /// Version of the application.
    pub application_version: Option<String>,
    /// Configuration.
    pub config: Object,
    /// Parameters, the secret ones included.
    pub parameters: Object,
}

impl CreateDeployment {
    /// What it changes of an empty row.
    pub(super) fn edit(&self) -> Edit {
        Edit {
            config: Patch { set: self.config.clone(), remove: Vec::new() },
            parameters: self.parameters.clone(),
            ..Edit::default()
        }
    }
}

/// The driver of the rows, or the last one that the edits bring.
pub(super) fn driver_of(rows: &Rows, edits: &[Edit]) -> Result<Arc<styrmin_renderer::driver::Driver>> {
    edits.iter().rev().find_map(Edit::brings).map_or_else(|| rows.driver(), Ok).cloned()
}
