// Command helm-controller stands in for Flux's helm-controller in tests: that one is not published as a Go
// module, so a fresh machine cannot build it.
//
// It reconciles HelmRelease on the Helm SDK so that everything a watcher can see is what the real one shows:
// conditions, generations, counters, history and events, in the same order. The recorded traces of the real
// one are the specification, and tests/tests/conformance.rs replays every one of them. It does install,
// upgrade, retries with remediation, rollback, uninstall, unlocking, post-renderers, valuesFrom, chartRef
// (HelmChart and OCIRepository), chart templates, dependsOn, drift detection, and the annotations that ask
// for a pass, a reset or a forced one. It lacks: Helm tests, kubeConfig, impersonation, the retry strategy
// RetryOnFailure, health check expressions, the inventory, the log tail in events, CRD policies beyond Skip.
//
// It takes the flags that the tests pass to either of the two, and some of its own.
package main

import (
	"context"
	"flag"
	"os"
	"time"

	"github.com/spf13/pflag"
	"go.uber.org/zap/zapcore"
	"helm.sh/helm/v4/pkg/kube"
	"k8s.io/apimachinery/pkg/runtime"
	clientgo "k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/builder"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/controller-runtime/pkg/predicate"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	v2 "github.com/fluxcd/helm-controller/api/v2"
	"github.com/fluxcd/pkg/runtime/predicates"
	sourcev1 "github.com/fluxcd/source-controller/api/v1"
)

func main() {
	var (
		metricsAddr  = pflag.String("metrics-addr", "0", "address of the metrics")
		healthAddr   = pflag.String("health-addr", "0", "address of /healthz and /readyz")
		_            = pflag.String("events-addr", "", "taken and not used")
		_            = pflag.Bool("enable-leader-election", false, "taken and not used")
		_            = pflag.String("log-level", "info", "taken and not used")
		concurrent   = pflag.Int("concurrent", 4, "how many objects are worked on at a time")
		minDelay     = pflag.Duration("min-retry-delay", 750*time.Millisecond, "first pause after a failed pass; it doubles")
		maxDelay     = pflag.Duration("max-retry-delay", 15*time.Minute, "longest pause after failed passes")
		dependencies = pflag.Duration("requeue-dependency", 30*time.Second, "how often something missing is looked at again")
		poll         = pflag.Duration("poll-interval", time.Second, "how often a release's objects are looked at while waiting")
		misbehave    = pflag.String("misbehave", "", "a built-in fault, to prove that the tests notice it: no-remediation, no-counters")
	)
	pflag.CommandLine.AddGoFlagSet(flag.CommandLine)
	pflag.Parse()
	ctrl.SetLogger(zap.New(zap.Level(zapcore.InfoLevel)))
	kube.ManagedFieldsManager = fieldManager

	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{clientgo.AddToScheme, v2.AddToScheme, sourcev1.AddToScheme} {
		exitOn(add(scheme))
	}
	config, err := ctrl.GetConfig()
	exitOn(err)
	config.QPS, config.Burst = 200, 400
	manager, err := ctrl.NewManager(config, ctrl.Options{
		Scheme:                 scheme,
		Metrics:                server.Options{BindAddress: *metricsAddr},
		HealthProbeBindAddress: *healthAddr,
	})
	exitOn(err)
	exitOn(manager.AddHealthzCheck("healthz", healthz.Ping))
	exitOn(manager.AddReadyzCheck("readyz", healthz.Ping))

	r := &reconciler{
		Client:             manager.GetClient(),
		direct:             manager.GetAPIReader(),
		events:             manager.GetEventRecorderFor(fieldManager),
		config:             config,
		dependencyInterval: *dependencies,
		pollInterval:       *poll,
		misbehave:          *misbehave,
	}
	exitOn(ctrl.NewControllerManagedBy(manager).
		For(&v2.HelmRelease{}, builder.WithPredicates(predicate.Or(
			predicate.GenerationChangedPredicate{}, predicates.ReconcileRequestedPredicate{}))).
		Watches(&sourcev1.HelmChart{}, handler.EnqueueRequestsFromMapFunc(r.usersOf), builder.WithPredicates(newArtifact{})).
		Watches(&sourcev1.OCIRepository{}, handler.EnqueueRequestsFromMapFunc(r.usersOf), builder.WithPredicates(newArtifact{})).
		WithOptions(controller.Options{
			MaxConcurrentReconciles: *concurrent,
			RateLimiter:             workqueue.NewTypedItemExponentialFailureRateLimiter[reconcile.Request](*minDelay, *maxDelay),
		}).
		Complete(r))
	exitOn(manager.Start(ctrl.SetupSignalHandler()))
}

func exitOn(err error) {
	if err != nil {
		ctrl.Log.Error(err, "helm-controller ends")
		os.Exit(1)
	}
}

// usersOf lists the objects whose chart comes from a source.
func (r *reconciler) usersOf(ctx context.Context, changed client.Object) []reconcile.Request {
	var all v2.HelmReleaseList
	if err := r.List(ctx, &all); err != nil {
		ctrl.LoggerFrom(ctx).Error(err, "HelmReleases cannot be listed")
		return nil
	}
	_, isChart := changed.(*sourcev1.HelmChart)
	var requests []reconcile.Request
	for i := range all.Items {
		obj := &all.Items[i]
		uses := isChart && obj.Spec.Chart != nil &&
			obj.Spec.Chart.GetNamespace(obj.Namespace) == changed.GetNamespace() && obj.GetHelmChartName() == changed.GetName()
		if ref := obj.Spec.ChartRef; ref != nil {
			namespace := ref.Namespace
			if namespace == "" {
				namespace = obj.Namespace
			}
			uses = isChart == (ref.Kind == sourcev1.HelmChartKind) && ref.Name == changed.GetName() && namespace == changed.GetNamespace()
		}
		if uses {
			requests = append(requests, reconcile.Request{NamespacedName: client.ObjectKeyFromObject(obj)})
		}
	}
	return requests
}

// newArtifact lets through what changes the artifact of a source or makes it ready.
type newArtifact struct{ predicate.Funcs }

func (newArtifact) Create(event.CreateEvent) bool   { return false }
func (newArtifact) Delete(event.DeleteEvent) bool   { return false }
func (newArtifact) Generic(event.GenericEvent) bool { return false }

func (newArtifact) Update(e event.UpdateEvent) bool {
	before, ok1 := e.ObjectOld.(source)
	after, ok2 := e.ObjectNew.(source)
	if !ok1 || !ok2 || after.GetArtifact() == nil {
		return false
	}
	if before.GetArtifact() == nil || !before.GetArtifact().HasRevision(after.GetArtifact().Revision) {
		return true
	}
	return whyNotReady(before, kindOf(before)) != "" && whyNotReady(after, kindOf(after)) == ""
}
