package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	chartv2 "helm.sh/helm/v4/pkg/chart/v2"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/record"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	v2 "github.com/fluxcd/helm-controller/api/v2"
	"github.com/fluxcd/pkg/apis/meta"
	"github.com/fluxcd/pkg/runtime/conditions"
	"github.com/fluxcd/pkg/runtime/patch"
)

// fieldManager owns what this program writes, as the real one's name does.
const fieldManager = "helm-controller"

// ownedConditions are never taken over from what another writer left.
var ownedConditions = []string{
	v2.ReleasedCondition, v2.RemediatedCondition, v2.TestSuccessCondition,
	meta.ReconcilingCondition, meta.ReadyCondition, meta.StalledCondition,
}

// reconciler brings HelmReleases to what they ask for.
type reconciler struct {
	client.Client
	// direct reads past the cache.
	direct client.Reader
	events record.EventRecorder
	config *rest.Config
	// dependencyInterval is how often something missing is looked at again.
	dependencyInterval time.Duration
	// pollInterval is how often a release's objects are looked at while waiting for them.
	pollInterval time.Duration
	// misbehave names a fault that is built in to prove that the tests of conformance notice it.
	misbehave string
}

// job is one object on its way through one pass.
type job struct {
	obj    *v2.HelmRelease
	chart  *chartv2.Chart
	values map[string]any
	save   func(context.Context, ...patch.Option) error
}

// Reconcile runs one pass and writes what came of it, whatever happens.
func (r *reconciler) Reconcile(ctx context.Context, request ctrl.Request) (result ctrl.Result, err error) {
	obj := &v2.HelmRelease{}
	if err := r.Get(ctx, request.NamespacedName, obj); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	if obj.HasChartRef() == obj.HasChartTemplate() {
		return ctrl.Result{}, reconcile.TerminalError(errors.New("exactly one of spec.chart and spec.chartRef must be set"))
	}
	patcher := patch.NewSerialPatcher(obj, r.Client)
	save := func(ctx context.Context, more ...patch.Option) error {
		return patcher.Patch(ctx, obj, append([]patch.Option{
			patch.WithFieldOwner(fieldManager), patch.WithOwnedConditions{Conditions: ownedConditions},
		}, more...)...)
	}
	result, err = r.pass(ctx, &job{obj: obj, save: save})

	if requested, ok := meta.ReconcileAnnotationValue(obj.GetAnnotations()); ok {
		obj.Status.SetLastHandledReconcileRequest(requested)
	}
	var more []patch.Option
	// The generation counts as observed when nothing more is to be done for it.
	if errors.Is(err, reconcile.TerminalError(nil)) || err == nil && !result.Requeue {
		more = append(more, patch.WithStatusObservedGeneration{})
	}
	if errors.Is(err, errWait) {
		err = nil
	}
	if failure := save(ctx, more...); failure != nil {
		if !obj.DeletionTimestamp.IsZero() && apierrors.IsNotFound(errors.Unwrap(failure)) || gone(failure) {
			failure = nil
		}
		err = errors.Join(err, failure)
	}
	r.untilCached(obj)
	return result, err
}

// gone reports whether every part of err says that the object is no longer there.
func gone(err error) bool {
	if parts, ok := err.(interface{ Errors() []error }); ok {
		for _, part := range parts.Errors() {
			if !apierrors.IsNotFound(part) {
				return false
			}
		}
		return true
	}
	return apierrors.IsNotFound(err)
}

// untilCached waits until the cache has the history that was written: the next pass relies on it.
func (r *reconciler) untilCached(obj *v2.HelmRelease) {
	_ = wait.PollUntilContextTimeout(context.Background(), 20*time.Millisecond, 10*time.Second, true,
		func(ctx context.Context) (bool, error) {
			cached := &v2.HelmRelease{}
			if err := r.Get(ctx, client.ObjectKeyFromObject(obj), cached); err != nil {
				return apierrors.IsNotFound(err), nil
			}
			return digestJSON(cached.Status.History) == digestJSON(obj.Status.History), nil
		})
}

func (r *reconciler) pass(ctx context.Context, j *job) (ctrl.Result, error) {
	obj := j.obj
	if !obj.DeletionTimestamp.IsZero() {
		return ctrl.Result{}, r.remove(ctx, obj)
	}
	if controllerutil.AddFinalizer(obj, v2.HelmReleaseFinalizer) {
		return ctrl.Result{Requeue: true}, nil
	}
	if obj.Spec.Suspend {
		return ctrl.Result{}, nil
	}
	if err := r.applyChartTemplate(ctx, obj); err != nil {
		return ctrl.Result{}, err
	}
	conditions.MarkReconciling(obj, meta.ProgressingReason, "Fulfilling prerequisites")
	if err := j.save(ctx); err != nil {
		return ctrl.Result{}, err
	}
	if err := r.prerequisites(ctx, j); err != nil {
		if errors.Is(err, errWait) {
			return ctrl.Result{RequeueAfter: r.dependencyInterval}, err
		}
		return ctrl.Result{}, err
	}
	helm, err := r.newHelm(ctx, obj)
	if err != nil {
		conditions.MarkFalse(obj, meta.ReadyCondition, "FactoryError", "%s", err)
		return ctrl.Result{}, err
	}
	if moved(obj, j.chart) {
		// What runs under the old name or in the old place would be in the way of an install.
		if err := helm.uninstall(obj, r.events); err != nil && !errors.Is(err, errNoRelease) {
			return ctrl.Result{}, err
		}
		obj.Status.ClearHistory()
		obj.Status.ClearFailures()
		obj.Status.StorageNamespace = ""
		return ctrl.Result{Requeue: true}, nil
	}
	r.beginAttempt(j)
	switch err := r.run(ctx, j, helm); {
	case errors.Is(err, errRequeue):
		return ctrl.Result{Requeue: true}, nil
	case errors.Is(err, errRetriesExceeded), errors.Is(err, errMissingTarget):
		return ctrl.Result{}, reconcile.TerminalError(err)
	case err != nil:
		return ctrl.Result{}, err
	}
	return ctrl.Result{RequeueAfter: obj.GetRequeueAfter()}, nil
}

// prerequisites finds chart and values. Each thing that fails says so in Ready, and takes it back once it
// is there.
func (r *reconciler) prerequisites(ctx context.Context, j *job) error {
	obj := j.obj
	mended := func(reasons ...string) {
		if conditions.HasAnyReason(obj, meta.ReadyCondition, reasons...) {
			conditions.MarkUnknown(obj, meta.ReadyCondition, meta.ProgressingReason, "reconciliation in progress")
		}
	}
	if err := r.dependencies(ctx, obj); err != nil {
		conditions.MarkFalse(obj, meta.ReadyCondition, v2.DependencyNotReadyReason, "%s", err)
		r.events.Event(obj, corev1.EventTypeNormal, v2.DependencyNotReadyReason, err.Error())
		return fmt.Errorf("%w: %w", errWait, err)
	}
	mended(v2.DependencyNotReadyReason)

	found, err := r.source(ctx, obj)
	if err != nil {
		conditions.MarkFalse(obj, meta.ReadyCondition, v2.ArtifactFailedReason, "could not get Source object: %s", err)
		return err
	}
	mended(v2.ArtifactFailedReason)
	if message := whyNotReady(found, kindOf(found)); message != "" {
		conditions.MarkFalse(obj, meta.ReadyCondition, "SourceNotReady", "%s", message)
		return fmt.Errorf("%w: %s", errWait, message)
	}
	mended("SourceNotReady")

	if j.values, err = r.values(ctx, obj); err != nil {
		conditions.MarkFalse(obj, meta.ReadyCondition, "ValuesError", "%s", err)
		r.events.Event(obj, corev1.EventTypeWarning, "ValuesError", err.Error())
		return err
	}
	mended("ValuesError")

	chart, revisionDigest, err := loadChart(ctx, found)
	if errors.Is(err, errArtifactGone) {
		conditions.MarkFalse(obj, meta.ReadyCondition, v2.ArtifactFailedReason, "Source not ready: %s. Retrying in %s", err, r.dependencyInterval)
		return fmt.Errorf("%w: %w", errWait, err)
	}
	if err != nil {
		conditions.MarkFalse(obj, meta.ReadyCondition, v2.ArtifactFailedReason, "Could not load chart: %s", err)
		r.events.Event(obj, corev1.EventTypeWarning, v2.ArtifactFailedReason, err.Error())
		return err
	}
	mended(v2.ArtifactFailedReason)
	j.chart = chart
	obj.Status.LastAttemptedRevisionDigest = revisionDigest
	return nil
}

// dependencies checks that every HelmRelease of spec.dependsOn is ready.
func (r *reconciler) dependencies(ctx context.Context, obj *v2.HelmRelease) error {
	for _, reference := range obj.Spec.DependsOn {
		other := &v2.HelmRelease{}
		key := client.ObjectKey{Namespace: reference.Namespace, Name: reference.Name}
		if key.Namespace == "" {
			key.Namespace = obj.Namespace
		}
		if err := r.direct.Get(ctx, key, other); err != nil {
			return fmt.Errorf("unable to get '%s' dependency: %w", key, err)
		}
		if other.Generation != other.Status.ObservedGeneration || !conditions.IsTrue(other, meta.ReadyCondition) {
			return fmt.Errorf("dependency '%s' is not ready", key)
		}
	}
	return nil
}

// moved reports whether the release lives elsewhere, or is of another chart, than the object says now.
func moved(obj *v2.HelmRelease, chart *chartv2.Chart) bool {
	current := obj.Status.History.Latest()
	if current == nil || obj.Status.StorageNamespace == "" {
		return false
	}
	return obj.Status.StorageNamespace != obj.GetStorageNamespace() ||
		current.Namespace != obj.GetReleaseNamespace() ||
		current.Name != releaseName(obj) ||
		current.ChartName != chart.Name() && obj.GetUpgrade().GetChartNameChangeStrategy() == v2.ChartNameChangeStrategyReinstall
}

// beginAttempt notes what is attempted. Failures of something else do not count against it.
func (r *reconciler) beginAttempt(j *job) {
	obj, status := j.obj, &j.obj.Status
	status.StorageNamespace = obj.GetStorageNamespace()
	config := digestValues(j.values)
	changed := status.LastAttemptedGeneration != obj.Generation ||
		status.LastAttemptedRevision != j.chart.Metadata.Version ||
		status.LastAttemptedConfigDigest != "" && status.LastAttemptedConfigDigest != config
	if changed || v2.ShouldHandleResetRequest(obj) {
		status.ClearFailures()
	}
	status.LastAttemptedGeneration = obj.Generation
	status.LastAttemptedRevision = j.chart.Metadata.Version
	status.LastAttemptedConfigDigest = config
}

// remove uninstalls the release of an object that is being deleted, and lets the object go.
func (r *reconciler) remove(ctx context.Context, obj *v2.HelmRelease) error {
	if !obj.Spec.Suspend {
		if obj.Status.StorageNamespace != "" {
			helm, err := r.newHelm(ctx, obj)
			if err != nil {
				conditions.MarkFalse(obj, meta.ReadyCondition, v2.UninstallFailedReason, "%s", err)
				return err
			}
			if err := helm.uninstall(obj, r.events); err != nil && !errors.Is(err, errNoRelease) {
				return err
			}
			obj.Status.ClearHistory()
			obj.Status.StorageNamespace = ""
		}
		if err := r.applyChartTemplate(ctx, obj); err != nil {
			return err
		}
	}
	controllerutil.RemoveFinalizer(obj, v2.HelmReleaseFinalizer)
	return nil
}
