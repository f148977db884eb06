package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	godigest "github.com/opencontainers/go-digest"
	chartv2 "helm.sh/helm/v4/pkg/chart/v2"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"helm.sh/helm/v4/pkg/strvals"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"

	v2 "github.com/fluxcd/helm-controller/api/v2"
	"github.com/fluxcd/pkg/apis/meta"
	"github.com/fluxcd/pkg/runtime/conditions"
	"github.com/fluxcd/pkg/ssa"
	sourcev1 "github.com/fluxcd/source-controller/api/v1"
)

// chartSizeLimit bounds what is read from an artifact, in bytes.
const chartSizeLimit = 64 << 20

// errWait is returned when something has to happen elsewhere first; a watch or a timer brings the object
// back.
var errWait = errors.New("must wait")

// applyChartTemplate makes the HelmChart of an object with spec.chart, or removes one that is no longer
// wanted.
func (r *reconciler) applyChartTemplate(ctx context.Context, obj *v2.HelmRelease) error {
	template := obj.Spec.Chart
	wanted := types.NamespacedName{}
	if template != nil {
		wanted = types.NamespacedName{Namespace: template.GetNamespace(obj.Namespace), Name: obj.GetHelmChartName()}
	}
	deleting := !obj.DeletionTimestamp.IsZero()
	if known := obj.Status.HelmChart; known != "" && (deleting || template == nil || known != wanted.String()) {
		if err := r.deleteChart(ctx, obj); err != nil {
			return err
		}
	}
	if deleting || template == nil {
		return nil
	}
	chart := &sourcev1.HelmChart{Spec: sourcev1.HelmChartSpec{
		Chart:   template.Spec.Chart,
		Version: template.Spec.Version,
		SourceRef: sourcev1.LocalHelmChartSourceReference{
			Kind: template.Spec.SourceRef.Kind, Name: template.Spec.SourceRef.Name,
		},
		Interval:                 template.GetInterval(obj.Spec.Interval),
		ReconcileStrategy:        template.Spec.ReconcileStrategy,
		ValuesFiles:              template.Spec.ValuesFiles,
		IgnoreMissingValuesFiles: template.Spec.IgnoreMissingValuesFiles,
	}}
	chart.SetGroupVersionKind(sourcev1.GroupVersion.WithKind(sourcev1.HelmChartKind))
	chart.Namespace, chart.Name = wanted.Namespace, wanted.Name
	if extra := template.ObjectMeta; extra != nil {
		chart.Labels, chart.Annotations = extra.Labels, extra.Annotations
	}
	content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(chart)
	if err != nil {
		return err
	}
	object := &unstructured.Unstructured{Object: content}
	manager := ssa.NewResourceManager(r.Client, nil, ssa.Owner{Group: v2.GroupVersion.Group, Field: fieldManager})
	manager.SetOwnerLabels([]*unstructured.Unstructured{object}, obj.Name, obj.Namespace)
	change, err := manager.Apply(ctx, object, ssa.DefaultApplyOptions())
	if err != nil {
		return fmt.Errorf("applying HelmChart %s: %w", wanted, err)
	}
	reason := map[ssa.Action]string{ssa.CreatedAction: "HelmChartCreated", ssa.ConfiguredAction: "HelmChartConfigured"}
	if reason, ok := reason[change.Action]; ok {
		r.events.Eventf(obj, corev1.EventTypeNormal, reason, "%s with SourceRef '%s/%s/%s'", change.Subject,
			chart.Spec.SourceRef.Kind, chart.Namespace, chart.Spec.SourceRef.Name)
	}
	obj.Status.HelmChart = wanted.String()
	return nil
}

func (r *reconciler) deleteChart(ctx context.Context, obj *v2.HelmRelease) error {
	chart := &sourcev1.HelmChart{}
	chart.Namespace, chart.Name = obj.Status.GetHelmChart()
	switch err := r.Delete(ctx, chart); {
	case apierrors.IsNotFound(err):
	case err != nil:
		return fmt.Errorf("deleting HelmChart %s: %w", obj.Status.HelmChart, err)
	default:
		r.events.Eventf(obj, corev1.EventTypeNormal, "HelmChartDeleted", "deleted HelmChart '%s'", obj.Status.HelmChart)
	}
	obj.Status.HelmChart = ""
	return nil
}

// source is what a chart comes from: a HelmChart or an OCIRepository.
type source interface {
	sourcev1.Source
	conditions.Getter
}

func (r *reconciler) source(ctx context.Context, obj *v2.HelmRelease) (source, error) {
	key := types.NamespacedName{}
	var found source = &sourcev1.HelmChart{}
	if ref := obj.Spec.ChartRef; ref != nil {
		key = types.NamespacedName{Namespace: ref.Namespace, Name: ref.Name}
		if key.Namespace == "" {
			key.Namespace = obj.Namespace
		}
		switch ref.Kind {
		case sourcev1.HelmChartKind:
		case sourcev1.OCIRepositoryKind:
			found = &sourcev1.OCIRepository{}
		default:
			return nil, fmt.Errorf("a chartRef of kind %s is not supported here", ref.Kind)
		}
	} else {
		key.Namespace, key.Name = obj.Status.GetHelmChart()
	}
	// Not from the cache, which may not yet have an object that was applied a moment ago.
	if err := r.direct.Get(ctx, key, found); err != nil {
		return nil, err
	}
	return found, nil
}

// whyNotReady is empty when the source has an artifact for its newest generation.
func whyNotReady(found source, kind string) string {
	message := ""
	switch observed := observedGeneration(found); {
	case found.GetGeneration() != observed:
		message = "latest generation of object has not been reconciled"
		if conditions.IsFalse(found, meta.ReadyCondition) {
			message = conditions.GetMessage(found, meta.ReadyCondition)
		}
	case conditions.IsStalled(found):
		message = conditions.GetMessage(found, meta.StalledCondition)
	case found.GetArtifact() == nil:
		message = "does not have an artifact"
	default:
		return ""
	}
	return fmt.Sprintf("%s '%s/%s' is not ready: %s", kind, found.GetNamespace(), found.GetName(), message)
}

func observedGeneration(found source) int64 {
	switch typed := found.(type) {
	case *sourcev1.HelmChart:
		return typed.Status.ObservedGeneration
	case *sourcev1.OCIRepository:
		return typed.Status.ObservedGeneration
	default:
		return -1
	}
}

func kindOf(found source) string {
	if _, ok := found.(*sourcev1.OCIRepository); ok {
		return sourcev1.OCIRepositoryKind
	}
	return sourcev1.HelmChartKind
}

var errArtifactGone = errors.New("artifact not found")

// loadChart downloads the artifact, checks its digest and reads it.
func loadChart(ctx context.Context, found source) (chart *chartv2.Chart, revisionDigest string, err error) {
	artifact := found.GetArtifact()
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, artifact.URL, nil)
	if err != nil {
		return nil, "", err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return nil, "", err
	}
	defer func() { _ = response.Body.Close() }()
	switch {
	case response.StatusCode == http.StatusNotFound:
		return nil, "", errArtifactGone
	case response.StatusCode != http.StatusOK:
		return nil, "", fmt.Errorf("artifact %s: %s", artifact.URL, response.Status)
	}
	content, err := io.ReadAll(io.LimitReader(response.Body, chartSizeLimit))
	if err != nil {
		return nil, "", err
	}
	expected, err := godigest.Parse(artifact.Digest)
	if err != nil {
		return nil, "", err
	}
	if expected.Algorithm().FromBytes(content) != expected {
		return nil, "", fmt.Errorf("artifact %s does not have the digest %s", artifact.URL, expected)
	}
	if chart, err = loader.LoadArchive(bytes.NewReader(content)); err != nil {
		return nil, "", err
	}
	if kindOf(found) == sourcev1.OCIRepositoryKind {
		// A tag can move: the digest in the version makes that an upgrade.
		_, revisionDigest, _ = strings.Cut(artifact.Revision, "@")
		if _, hex, ok := strings.Cut(revisionDigest, ":"); ok && len(hex) >= 12 {
			version, _, _ := strings.Cut(chart.Metadata.Version, "+")
			chart.Metadata.Version = version + "+" + hex[:12]
		}
	}
	return chart, revisionDigest, nil
}

// values merges spec.valuesFrom in order, then spec.values. A null stays a null: Helm removes the chart's
// default for it.
func (r *reconciler) values(ctx context.Context, obj *v2.HelmRelease) (map[string]any, error) {
	merged := map[string]any{}
	for _, ref := range obj.Spec.ValuesFrom {
		text, err := r.referenced(ctx, obj.Namespace, ref)
		if err != nil {
			if ref.Optional && apierrors.IsNotFound(err) {
				continue
			}
			return nil, fmt.Errorf("could not resolve %s chart values reference '%s/%s' with key '%s': %w",
				ref.Kind, obj.Namespace, ref.Name, ref.GetValuesKey(), err)
		}
		if ref.TargetPath != "" {
			if err := setPath(merged, ref.TargetPath, text); err != nil {
				return nil, fmt.Errorf("%s '%s/%s', targetPath %s: %w", ref.Kind, obj.Namespace, ref.Name, ref.TargetPath, err)
			}
			continue
		}
		var part map[string]any
		if err := yaml.Unmarshal([]byte(text), &part); err != nil {
			return nil, fmt.Errorf("unable to read values from key '%s' in %s '%s/%s': %w",
				ref.GetValuesKey(), ref.Kind, obj.Namespace, ref.Name, err)
		}
		merged = merge(merged, part)
	}
	return merge(merged, obj.GetValues()), nil
}

func (r *reconciler) referenced(ctx context.Context, namespace string, ref meta.ValuesReference) (string, error) {
	key := types.NamespacedName{Namespace: namespace, Name: ref.Name}
	missing := fmt.Errorf("missing key '%s'", ref.GetValuesKey())
	if ref.Kind == "ConfigMap" {
		var found corev1.ConfigMap
		if err := r.direct.Get(ctx, key, &found); err != nil {
			return "", err
		}
		if text, ok := found.Data[ref.GetValuesKey()]; ok {
			return text, nil
		}
		return "", missing
	}
	var found corev1.Secret
	if err := r.direct.Get(ctx, key, &found); err != nil {
		return "", err
	}
	if text, ok := found.Data[ref.GetValuesKey()]; ok {
		return string(text), nil
	}
	return "", missing
}

// setPath sets one value. In quotes it stays text; otherwise Helm's rules of --set decide its type.
func setPath(values map[string]any, path, text string) error {
	text = strings.TrimRight(text, "\n")
	if len(text) > 1 && (text[0] == '"' || text[0] == '\'') && text[len(text)-1] == text[0] {
		return strvals.ParseIntoString(path+"="+strings.Trim(text, text[:1]), values)
	}
	return strvals.ParseInto(path+"="+text, values)
}

// merge lays over on base; maps are merged, everything else is replaced.
func merge(base, over map[string]any) map[string]any {
	out := make(map[string]any, len(base)+len(over))
	for key, value := range base {
		out[key] = value
	}
	for key, value := range over {
		if inner, ok := value.(map[string]any); ok {
			if known, ok := out[key].(map[string]any); ok {
				out[key] = merge(known, inner)
				continue
			}
		}
		out[key] = value
	}
	return out
}
