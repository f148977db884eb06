package main

import (
	"bytes"
	"encoding/json"
	"sync"

	"helm.sh/helm/v4/pkg/postrenderer"
	"sigs.k8s.io/kustomize/api/builtins"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/api/provider"
	"sigs.k8s.io/kustomize/api/resmap"
	kustomize "sigs.k8s.io/kustomize/api/types"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/kustomize/kyaml/resid"

	v2 "github.com/fluxcd/helm-controller/api/v2"
)

// postRenderer applies an object's post-renderers, then its common metadata, then the labels that name the
// object. Helm gives it hooks and other manifests together.
type postRenderer struct{ obj *v2.HelmRelease }

var _ postrenderer.PostRenderer = postRenderer{}

// building guards kustomize's builder, which keeps state of the whole process.
var building sync.Mutex

func (p postRenderer) Run(rendered *bytes.Buffer) (*bytes.Buffer, error) {
	text := rendered.Bytes()
	for _, renderer := range p.obj.Spec.PostRenderers {
		if renderer.Kustomize == nil {
			continue
		}
		var err error
		if text, err = build(text, renderer.Kustomize); err != nil {
			return nil, err
		}
	}
	resources, err := resmap.NewFactory(provider.NewDefaultDepProvider().GetResourceFactory()).NewResMapFromBytes(text)
	if err != nil {
		return nil, err
	}
	labels := func(labels map[string]string) error {
		return (&builtins.LabelTransformerPlugin{
			Labels:     labels,
			FieldSpecs: []kustomize.FieldSpec{{Path: "metadata/labels", CreateIfNotPresent: true}},
		}).Transform(resources)
	}
	if common := p.obj.Spec.CommonMetadata; common != nil {
		if err := labels(common.Labels); err != nil {
			return nil, err
		}
		err := (&builtins.AnnotationsTransformerPlugin{
			Annotations: common.Annotations,
			FieldSpecs:  []kustomize.FieldSpec{{Path: "metadata/annotations", CreateIfNotPresent: true}},
		}).Transform(resources)
		if err != nil {
			return nil, err
		}
	}
	group := v2.GroupVersion.Group
	if err := labels(map[string]string{group + "/name": p.obj.Name, group + "/namespace": p.obj.Namespace}); err != nil {
		return nil, err
	}
	out, err := resources.AsYaml()
	return bytes.NewBuffer(out), err
}

// build runs one kustomize post-renderer.
func build(text []byte, renderer *v2.Kustomize) ([]byte, error) {
	const input = "manifests.yaml"
	kustomization := kustomize.Kustomization{
		TypeMeta:  kustomize.TypeMeta{APIVersion: kustomize.KustomizationVersion, Kind: kustomize.KustomizationKind},
		Resources: []string{input},
	}
	for _, image := range renderer.Images {
		kustomization.Images = append(kustomization.Images, kustomize.Image{
			Name: image.Name, NewName: image.NewName, NewTag: image.NewTag, Digest: image.Digest,
		})
	}
	for _, patch := range renderer.Patches {
		adapted := kustomize.Patch{Patch: patch.Patch}
		if target := patch.Target; target != nil {
			adapted.Target = &kustomize.Selector{
				ResId: resid.ResId{
					Gvk:  resid.Gvk{Group: target.Group, Version: target.Version, Kind: target.Kind},
					Name: target.Name, Namespace: target.Namespace,
				},
				LabelSelector:      target.LabelSelector,
				AnnotationSelector: target.AnnotationSelector,
			}
		}
		kustomization.Patches = append(kustomization.Patches, adapted)
	}
	description, err := json.Marshal(kustomization)
	if err != nil {
		return nil, err
	}
	files := filesys.MakeFsInMemory()
	if err := files.WriteFile(input, text); err != nil {
		return nil, err
	}
	if err := files.WriteFile("kustomization.yaml", description); err != nil {
		return nil, err
	}
	building.Lock()
	defer building.Unlock()
	built, err := krusty.MakeKustomizer(&krusty.Options{
		LoadRestrictions: kustomize.LoadRestrictionsNone,
		PluginConfig:     kustomize.DisabledPluginConfig(),
	}).Run(files, ".")
	if err != nil {
		return nil, err
	}
	return built.AsYaml()
}

// postRenderersDigest is empty when there are none.
func postRenderersDigest(obj *v2.HelmRelease) string {
	if obj.Spec.PostRenderers == nil {
		return ""
	}
	return digestJSON(obj.Spec.PostRenderers)
}

// commonMetadataDigest is empty when there is none.
func commonMetadataDigest(obj *v2.HelmRelease) string {
	if obj.Spec.CommonMetadata == nil {
		return ""
	}
	return digestJSON(obj.Spec.CommonMetadata)
}
