package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sort"
	"strings"

	"github.com/fluxcd/pkg/ssa"
	"github.com/fluxcd/pkg/ssa/jsondiff"
	"github.com/fluxcd/pkg/ssa/normalize"
	ssautil "github.com/fluxcd/pkg/ssa/utils"
	jsonpatch "github.com/wI2L/jsondiff"
	releasev1 "helm.sh/helm/v4/pkg/release/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/apiutil"

	v2 "github.com/fluxcd/helm-controller/api/v2"
)

// findDrift compares the manifest of a release with the cluster by a dry run of server-side apply.
func findDrift(ctx context.Context, cluster client.Client, rls *releasev1.Release, ignore []v2.IgnoreRule) (jsondiff.DiffSet, error) {
	objects, err := ssautil.ReadObjects(strings.NewReader(rls.Manifest))
	if err != nil {
		return nil, fmt.Errorf("reading the manifest of %s: %w", rls.Name, err)
	}
	if err := normalize.UnstructuredListWithScheme(objects, cluster.Scheme()); err != nil {
		return nil, err
	}
	for _, object := range objects {
		// As Helm does when it applies them.
		object.SetLabels(with(object.GetLabels(), map[string]string{"app.kubernetes.io/managed-by": "Helm"}))
		object.SetAnnotations(with(object.GetAnnotations(), map[string]string{
			"meta.helm.sh/release-name": rls.Name, "meta.helm.sh/release-namespace": rls.Namespace,
		}))
		if object.GetNamespace() != "" {
			continue
		}
		namespaced, err := apiutil.IsObjectNamespaced(object, cluster.Scheme(), cluster.RESTMapper())
		if err != nil {
			return nil, err
		}
		if namespaced {
			object.SetNamespace(rls.Namespace)
		}
	}
	options := []jsondiff.ListOption{
		jsondiff.FieldOwner(fieldManager),
		jsondiff.ExclusionSelector{v2.DriftDetectionMetadataKey: v2.DriftDetectionDisabledValue},
		jsondiff.Rationalize(true),
		jsondiff.Graceful(true),
	}
	var rules jsondiff.IgnoreRules
	for _, rule := range ignore {
		adapted := jsondiff.IgnoreRule{Paths: rule.Paths}
		if target := rule.Target; target != nil {
			adapted.Selector = &jsondiff.Selector{
				Group: target.Group, Version: target.Version, Kind: target.Kind, Name: target.Name,
				Namespace: target.Namespace, AnnotationSelector: target.AnnotationSelector, LabelSelector: target.LabelSelector,
			}
		}
		rules = append(rules, adapted)
	}
	if len(rules) > 0 {
		options = append(options, rules)
	}
	return jsondiff.UnstructuredList(ctx, client.NewDryRunClient(cluster), objects, options...)
}

func with(map1, map2 map[string]string) map[string]string {
	merged := make(map[string]string, len(map1)+len(map2))
	for _, source := range []map[string]string{map1, map2} {
		for key, value := range source {
			merged[key] = value
		}
	}
	return merged
}

// correctDrift puts back what differs. The first result says what it did, a line for each object.
func correctDrift(ctx context.Context, cluster client.Client, found jsondiff.DiffSet) (string, error) {
	found = append(jsondiff.DiffSet(nil), found...)
	sort.SliceStable(found, func(i, j int) bool {
		a, b := found[i].GroupVersionKind().GroupKind(), found[j].GroupVersionKind().GroupKind()
		return ssa.IsLessThan(a, b)
	})
	var done []string
	var failures []error
	for _, diff := range found {
		object, ok := diff.DesiredObject.DeepCopyObject().(client.Object)
		if !ok {
			continue
		}
		var err error
		verb := ""
		switch diff.Type {
		case jsondiff.DiffTypeCreate:
			verb = "created"
			err = cluster.Create(ctx, object, client.FieldOwner(fieldManager))
		case jsondiff.DiffTypeUpdate:
			verb = "configured"
			var text []byte
			if text, err = json.Marshal(diff.Patch); err == nil {
				err = cluster.Patch(ctx, object, client.RawPatch(types.JSONPatchType, text), client.FieldOwner(fieldManager))
			}
		default:
			continue
		}
		if err != nil {
			failures = append(failures, fmt.Errorf("%s: %w", nameOf(object), err))
			continue
		}
		done = append(done, nameOf(object)+" "+verb)
	}
	return strings.Join(done, "\n"), errors.Join(failures...)
}

// describeDrift has a line for each object that differs.
func describeDrift(found jsondiff.DiffSet) string {
	var lines []string
	for _, diff := range found {
		switch diff.Type {
		case jsondiff.DiffTypeCreate:
			lines = append(lines, nameOf(diff.DesiredObject)+" removed")
		case jsondiff.DiffTypeExclude:
			lines = append(lines, nameOf(diff.DesiredObject)+" excluded")
		case jsondiff.DiffTypeUpdate:
			counts := map[string]int{}
			for _, change := range diff.Patch {
				counts[change.Type]++
			}
			lines = append(lines, fmt.Sprintf("%s changed (%d additions, %d changes, %d removals)", nameOf(diff.DesiredObject),
				counts[jsonpatch.OperationAdd], counts[jsonpatch.OperationReplace], counts[jsonpatch.OperationRemove]))
		}
	}
	return strings.Join(lines, "\n")
}

func nameOf(object client.Object) string {
	name := object.GetObjectKind().GroupVersionKind().Kind + "/"
	if namespace := object.GetNamespace(); namespace != "" {
		name += namespace + "/"
	}
	return name + object.GetName()
}
