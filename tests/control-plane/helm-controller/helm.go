package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"sync"
	"time"

	"helm.sh/helm/v4/pkg/action"
	chartv2 "helm.sh/helm/v4/pkg/chart/v2"
	"helm.sh/helm/v4/pkg/kube"
	releasev1 "helm.sh/helm/v4/pkg/release/v1"
	"helm.sh/helm/v4/pkg/storage"
	"helm.sh/helm/v4/pkg/storage/driver"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/restmapper"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/client-go/tools/record"
	"sigs.k8s.io/controller-runtime/pkg/client"

	v2 "github.com/fluxcd/helm-controller/api/v2"
	"github.com/fluxcd/pkg/runtime/conditions"
)

// errNoRelease is returned when there is nothing to uninstall.
var errNoRelease = errors.New("no latest release")

// helm runs Helm's actions for one object.
type helm struct {
	ctx     context.Context
	getter  *getter
	storage driver.Driver
	// cluster is a client without a cache.
	cluster  client.Client
	interval time.Duration
	events   record.EventRecorder
}

func (r *reconciler) newHelm(ctx context.Context, obj *v2.HelmRelease) (*helm, error) {
	getter := &getter{config: r.config, namespace: obj.GetReleaseNamespace()}
	mapper, err := getter.ToRESTMapper()
	if err != nil {
		return nil, err
	}
	cluster, err := client.New(r.config, client.Options{Mapper: mapper})
	if err != nil {
		return nil, err
	}
	clients, err := kubernetes.NewForConfig(r.config)
	if err != nil {
		return nil, err
	}
	namespace := obj.Status.StorageNamespace
	if namespace == "" {
		namespace = obj.GetStorageNamespace()
	}
	return &helm{
		ctx:      ctx,
		getter:   getter,
		storage:  driver.NewSecrets(clients.CoreV1().Secrets(namespace)),
		cluster:  cluster,
		interval: r.pollInterval,
		events:   r.events,
	}, nil
}

// configuration is what Helm's actions run with; saw is told of every release that they write.
func (h *helm) configuration(saw func(*releasev1.Release)) (*action.Configuration, error) {
	mapper, err := h.getter.ToRESTMapper()
	if err != nil {
		return nil, err
	}
	configuration := action.NewConfiguration()
	configuration.RESTClientGetter = h.getter
	configuration.Releases = storage.Init(watchedDriver{Driver: h.storage, saw: saw})
	configuration.KubeClient = &helmClient{
		Client: kube.New(h.getter),
		waiter: waiter{ctx: h.ctx, client: h.cluster, mapper: mapper, interval: h.interval},
	}
	return configuration, nil
}

// last is the newest release in the storage, or nil.
func (h *helm) last(obj *v2.HelmRelease) (*releasev1.Release, error) {
	found, err := storage.Init(h.storage).Last(releaseName(obj))
	if errors.Is(err, driver.ErrReleaseNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return typed(found)
}

func typed(found any) (*releasev1.Release, error) {
	if rls, ok := found.(*releasev1.Release); ok {
		return rls, nil
	}
	return nil, fmt.Errorf("a release of type %T is not supported", found)
}

// target says whether the release that a rollback would go back to can be used.
func (h *helm) target(obj *v2.HelmRelease) (targetState, error) {
	previous := obj.Status.History.Previous(true)
	if previous == nil {
		return targetUnknown, nil
	}
	found, err := storage.Init(h.storage).Get(previous.Name, previous.Version)
	if errors.Is(err, driver.ErrReleaseNotFound) {
		return targetBroken, nil
	}
	if err != nil {
		return targetBroken, err
	}
	rls, err := typed(found)
	if err != nil || digestOf(rls) != previous.Digest {
		return targetBroken, err
	}
	return targetUsable, nil
}

func (h *helm) install(obj *v2.HelmRelease, chart *chartv2.Chart, values map[string]any, saw func(*releasev1.Release)) error {
	configuration, err := h.configuration(saw)
	if err != nil {
		return err
	}
	spec, install := obj.GetInstall(), action.NewInstall(configuration)
	install.ReleaseName = releaseName(obj)
	install.Namespace = obj.GetReleaseNamespace()
	install.CreateNamespace = obj.Spec.TargetNamespace != "" && spec.CreateNamespace
	install.Timeout = spec.GetTimeout(obj.GetTimeout()).Duration
	install.WaitStrategy = strategy(spec.DisableWait)
	install.WaitForJobs = !spec.DisableWaitForJobs
	install.TakeOwnership = !spec.DisableTakeOwnership
	install.DisableHooks = spec.DisableHooks
	install.DisableOpenAPIValidation = spec.DisableOpenAPIValidation
	install.SkipSchemaValidation = spec.DisableSchemaValidation
	install.SkipCRDs = spec.CRDs == v2.Skip
	install.Replace = spec.Replace
	install.Devel = true
	install.ServerSideApply = spec.ServerSideApply == nil || *spec.ServerSideApply
	install.ForceConflicts = install.ServerSideApply
	install.PostRenderer = postRenderer{obj}
	install.PostRenderStrategy = action.PostRenderStrategy(obj.GetPostRenderStrategy())
	_, err = install.RunWithContext(h.ctx, chart, values)
	return err
}

func (h *helm) upgrade(obj *v2.HelmRelease, chart *chartv2.Chart, values map[string]any, saw func(*releasev1.Release)) error {
	configuration, err := h.configuration(saw)
	if err != nil {
		return err
	}
	last, err := h.last(obj)
	if err != nil {
		return err
	}
	spec, upgrade := obj.GetUpgrade(), action.NewUpgrade(configuration)
	upgrade.Namespace = obj.GetReleaseNamespace()
	upgrade.ResetValues = !spec.PreserveValues
	upgrade.ReuseValues = spec.PreserveValues
	upgrade.MaxHistory = obj.GetMaxHistory()
	upgrade.Timeout = spec.GetTimeout(obj.GetTimeout()).Duration
	upgrade.WaitStrategy = strategy(spec.DisableWait)
	upgrade.WaitForJobs = !spec.DisableWaitForJobs
	upgrade.TakeOwnership = !spec.DisableTakeOwnership
	upgrade.DisableHooks = spec.DisableHooks
	upgrade.DisableOpenAPIValidation = spec.DisableOpenAPIValidation
	upgrade.SkipSchemaValidation = spec.DisableSchemaValidation
	upgrade.CleanupOnFail = spec.CleanupOnFail
	upgrade.Devel = true
	apply := serverSideApply(spec.ServerSideApply, last)
	upgrade.ServerSideApply = fmt.Sprint(apply)
	upgrade.ForceConflicts = apply
	upgrade.ForceReplace = spec.Force && !apply
	upgrade.PostRenderer = postRenderer{obj}
	upgrade.PostRenderStrategy = action.PostRenderStrategy(obj.GetPostRenderStrategy())
	_, err = upgrade.RunWithContext(h.ctx, releaseName(obj), chart, values)
	return err
}

func (h *helm) rollback(obj *v2.HelmRelease, to *v2.Snapshot, saw func(*releasev1.Release)) error {
	configuration, err := h.configuration(saw)
	if err != nil {
		return err
	}
	found, err := configuration.Releases.Get(to.Name, to.Version)
	if err != nil {
		return err
	}
	target, err := typed(found)
	if err != nil {
		return err
	}
	spec, rollback := obj.GetRollback(), action.NewRollback(configuration)
	rollback.Version = to.Version
	rollback.Timeout = spec.GetTimeout(obj.GetTimeout()).Duration
	rollback.WaitStrategy = strategy(spec.DisableWait)
	rollback.WaitForJobs = !spec.DisableWaitForJobs
	rollback.DisableHooks = spec.DisableHooks
	rollback.CleanupOnFail = spec.CleanupOnFail
	rollback.MaxHistory = obj.GetMaxHistory()
	apply := serverSideApply(spec.ServerSideApply, target)
	rollback.ServerSideApply = fmt.Sprint(apply)
	rollback.ForceConflicts = apply
	rollback.ForceReplace = spec.Force && !apply
	return rollback.Run(to.Name)
}

// uninstallRelease removes the newest release, which must be the one that the object knows as its own.
func (h *helm) uninstallRelease(obj *v2.HelmRelease, saw func(*releasev1.Release)) error {
	current := *obj.Status.History.Latest()
	configuration, err := h.configuration(saw)
	if err != nil {
		return err
	}
	spec, uninstall := obj.GetUninstall(), action.NewUninstall(configuration)
	uninstall.Timeout = spec.GetTimeout(obj.GetTimeout()).Duration
	uninstall.DisableHooks = spec.DisableHooks
	uninstall.KeepHistory = spec.KeepHistory
	uninstall.WaitStrategy = strategy(spec.DisableWait)
	uninstall.DeletionPropagation = spec.GetDeletionPropagation()
	answer, err := uninstall.Run(current.Name)
	if err != nil {
		return err
	}
	if answer != nil && answer.Release != nil {
		removed, err := typed(answer.Release)
		if err != nil {
			return err
		}
		if !current.Targets(removed.Name, removed.Namespace, removed.Version) {
			return fmt.Errorf("release mismatch: uninstalled release %s/%s.v%d != current release %s",
				removed.Namespace, removed.Name, removed.Version, current.FullReleaseName())
		}
	}
	if obj.Status.History.Latest().Digest == current.Digest && current.Status != "uninstalled" {
		return errors.New("uninstall completed with error: release not updated in Helm storage")
	}
	return nil
}

// uninstall removes the release because the object goes, or lives elsewhere now.
func (h *helm) uninstall(obj *v2.HelmRelease, events record.EventRecorder) error {
	defer summarize(obj)
	latest := obj.Status.History.Latest()
	if latest == nil {
		return errNoRelease
	}
	current := *latest
	err := h.uninstallRelease(obj, func(rls *releasev1.Release) {
		replaceSnapshot(obj, rls, v2.ReleaseActionUninstall)
	})
	if errors.Is(err, driver.ErrReleaseNotFound) {
		conditions.MarkFalse(obj, v2.ReleasedCondition, v2.UninstallSucceededReason,
			"Release %s was not found, assuming it is uninstalled", current.FullReleaseName())
		return nil
	}
	if err != nil {
		obj.Status.Failures++
		message := fmt.Sprintf("Helm uninstall failed for release %s with chart %s: %s",
			current.FullReleaseName(), current.VersionedChartName(), err)
		conditions.MarkFalse(obj, v2.ReleasedCondition, v2.UninstallFailedReason, "%s", message)
		events.Event(obj, corev1.EventTypeWarning, v2.UninstallFailedReason, message)
		return err
	}
	message := fmt.Sprintf("Helm uninstall succeeded for release %s with chart %s",
		current.FullReleaseName(), current.VersionedChartName())
	conditions.MarkFalse(obj, v2.ReleasedCondition, v2.UninstallSucceededReason, "%s", message)
	events.Event(obj, corev1.EventTypeNormal, v2.UninstallSucceededReason, message)
	return nil
}

func strategy(disableWait bool) kube.WaitStrategy {
	if disableWait {
		return kube.HookOnlyStrategy
	}
	return kube.StatusWatcherStrategy
}

// serverSideApply follows the setting, or else what the release before was applied with.
func serverSideApply(mode v2.ServerSideApplyMode, before *releasev1.Release) bool {
	switch mode {
	case v2.ServerSideApplyEnabled:
		return true
	case v2.ServerSideApplyDisabled:
		return false
	default:
		return before != nil && before.ApplyMethod == "ssa"
	}
}

// releaseName is the name of the object's release: Helm allows 53 characters.
func releaseName(obj *v2.HelmRelease) string {
	const most, hash = 53, 12
	name := obj.GetReleaseName()
	if len(name) <= most {
		return name
	}
	return name[:most-hash-1] + "-" + fmt.Sprintf("%x", sha256.Sum256([]byte(name)))[:hash]
}

// getter gives Helm its connections, with what the API server offers kept in memory.
type getter struct {
	config    *rest.Config
	namespace string
	once      sync.Once
	cached    discovery.CachedDiscoveryInterface
	failure   error
}

func (g *getter) ToRESTConfig() (*rest.Config, error) { return rest.CopyConfig(g.config), nil }

func (g *getter) ToDiscoveryClient() (discovery.CachedDiscoveryInterface, error) {
	g.once.Do(func() {
		var found *discovery.DiscoveryClient
		if found, g.failure = discovery.NewDiscoveryClientForConfig(g.config); g.failure == nil {
			g.cached = memory.NewMemCacheClient(found)
		}
	})
	return g.cached, g.failure
}

func (g *getter) ToRESTMapper() (meta.RESTMapper, error) {
	found, err := g.ToDiscoveryClient()
	if err != nil {
		return nil, err
	}
	return restmapper.NewDeferredDiscoveryRESTMapper(found), nil
}

func (g *getter) ToRawKubeConfigLoader() clientcmd.ClientConfig {
	overrides := &clientcmd.ConfigOverrides{Context: api.Context{Namespace: g.namespace}}
	return clientcmd.NewDefaultClientConfig(*api.NewConfig(), overrides)
}
